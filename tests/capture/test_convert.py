"""Regions of an exported graph: what is inlined and how."""

import torch
from torch import Tensor, nn

from .agreement import agree


def test_every_region_of_no_grad_inside_a_checkpoint_is_in_the_checkpoint():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 3, bias=False, dtype=torch.float64)

        def inner(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                scale = x.abs().sum()
            return self.linear(x) / scale

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    captured = agree(Both(), torch.randn(2, 3, dtype=torch.float64))
    assert [(op.region, op.no_grad) for op in captured.graph.ops] == [
        ("r0", True), ("r0", True), ("r0", False), ("r0", False),
    ]  # fmt: skip

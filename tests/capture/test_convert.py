"""Regions of an exported graph: what is inlined and how."""

import torch
from torch import Tensor, nn

from shardwright.capture import capture

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


class Checking(nn.Module):
    """A check of what is in a tensor, as transformers counts the places of images in a text."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        torch._check(mask.sum().item() == 3)
        return self.linear(x) * mask


def test_a_check_of_the_values_in_a_tensor_computes_nothing_and_is_left_out():
    graph = capture(Checking(), (torch.randn(3, 4), torch.ones(3, 1)), {}).graph
    assert [op.target for op in graph.ops if "sum" in op.target or "item" in op.target] == []

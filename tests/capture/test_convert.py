"""Regions of an exported graph: what is inlined and how."""

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture, run

from .agreement import agree


class Chooses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.weight
        return torch.cond(y.sum() > 0, lambda held: held * 2, lambda held: held.sin(), (y,))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_cond_runs_both_branches_and_chooses(sign):
    module, x = Chooses(), sign * torch.rand(2, 3, dtype=torch.float64)
    captured = capture(module, (x,))
    outputs, _, _ = run(captured, [x], {"weight": module.weight}, {})
    outputs[0].sum().backward()
    assert torch.equal(outputs[0], 2 * x if sign > 0 else x.sin())
    assert torch.equal(module.weight.grad, (2 * x if sign > 0 else x * x.cos()).sum(0))
    assert "torch.cond" in captured.graph.notes[0]


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

"""Autocast and no_grad regions are inlined: casts explicit, gradients cut where they were."""

import torch
from torch import Tensor, nn

from .agreement import agree, ops


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            h = self.up(x)
            with torch.autocast("cpu", enabled=False):
                exact = self.down(x)
            y = self.down(h.relu()) + self.up(x)
        return y.float() + exact


def test_autocast_becomes_casts_and_the_numbers_are_the_same():
    captured = agree(Mixed(), torch.randn(3, 8), tolerance=0.0)
    assert [op.autocast for op in captured.graph.ops] == [None] * len(captured.graph.ops)
    dtypes = [captured.graph.values[op.outputs[0]].dtype for op in ops(captured, "linear")]
    assert dtypes == ["bfloat16", "float32", "bfloat16", "bfloat16"]


def test_a_weight_is_cast_once_in_a_region():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(8, 8, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return self.up(self.up(x))

    captured = agree(Twice(), torch.randn(3, 8), tolerance=0.0)
    assert len([op for op in ops(captured, "_to_copy") if op.inputs == ("up_weight",)]) == 1


def test_an_op_that_casts_inside_stays_in_its_region():
    class Einsum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 8))

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return torch.einsum("bsd,od->bso", x, self.weight)

    captured = agree(Einsum(), torch.randn(2, 3, 8), tolerance=0.0)
    [op] = ops(captured, "einsum")
    assert op.autocast == "cpu:bfloat16"


def test_no_grad_stops_the_gradient_and_preserves_module_and_line():
    class Target(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student = nn.Linear(4, 4, dtype=torch.float64)
            self.teacher = nn.Linear(4, 4, dtype=torch.float64)

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                goal = self.teacher(x)
            return (self.student(x) - goal).square().mean() + self.student(x).detach().sum()

    captured = agree(Target(), torch.randn(3, 4, dtype=torch.float64))
    teacher = captured.graph.by_name["teacher / linear"]
    assert teacher.no_grad
    assert not captured.graph.values[teacher.outputs[0]].gradient
    assert teacher.source.code == "goal = self.teacher(x)"
    assert not captured.graph.by_name["student / linear"].no_grad

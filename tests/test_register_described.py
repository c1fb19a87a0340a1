"""Registered functions that can't run without values, that take lists, and that are somebody else's."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.errors import CaptureError, InputError, RuleError
from tests import third_party
from tests.parity.threaded import compare
from tests.third_party import standardized as imported_before


@sw.register_op("b d -> b d", shapes=lambda x, power: x.shape, probe=lambda: (torch.randn(6, 4).double(), 3))
class NumpyPower(torch.autograd.Function):
    """A kernel and its gradient in numpy."""

    @staticmethod
    def forward(ctx, x: Tensor, power: int):
        ctx.save_for_backward(x)
        ctx.power = power
        return torch.from_numpy(np.power(x.detach().numpy(), power))

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        slope = ctx.power * np.power(x.numpy(), ctx.power - 1)
        return gradient * torch.from_numpy(slope), None


@sw.register_op("b d^ -> b d^, b", shapes=lambda x: (x.shape, torch.empty(x.shape[0], dtype=torch.long)), check=False)
def ranked(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two outputs, one of whole numbers, and no gradient."""
    values = x.detach().numpy()
    return torch.from_numpy(np.sort(values, -1).copy()), torch.from_numpy(values.argmax(-1))


class Described(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = NumpyPower.apply(self.first(x), 3)
        order, place = ranked(y)
        return (self.last(y + order) * place.unsqueeze(-1)).square().mean()


PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2"]


@pytest.mark.parametrize("plan", PLANS)
def test_a_function_that_needs_values_is_described_by_its_shapes(plan):
    torch.manual_seed(0)
    compare(Described(), (torch.randn(4, 8),), plan)


class Calls(nn.Module):
    def __init__(self, function: object) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(8, 8), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x)).square().mean()


def test_without_its_shapes_it_is_refused_with_that_remedy():
    plain = sw.register_op(None, lambda x: torch.from_numpy(x.detach().numpy() * 2))
    with pytest.raises(CaptureError, match="shapes="):
        capture(Calls(plain), (torch.randn(4, 8),))


def test_shapes_that_are_not_true_are_an_error_when_it_runs():
    wrong = sw.register_op("b d -> b d", lambda x: x * 2, shapes=lambda x: (x.shape[0], 1), check=False)
    with pytest.raises(InputError, match=r"returned \[2, 8\] of float64, and its shapes= gives \[2, 1\]"):
        compare(Calls(lambda x: wrong(x) + x), (torch.randn(4, 8),), "dp=2")


def test_a_change_that_nobody_could_see_is_an_error_when_it_runs():
    def grows(x: Tensor) -> Tensor:
        x.detach().numpy()[:] += 1
        return x * 2

    grown = sw.register_op("b d -> b d", grows, shapes=lambda x: x.shape, check=False)
    with pytest.raises(InputError, match="changes its tensor argument 0"):
        compare(Calls(lambda x: grown(x * 1)), (torch.randn(4, 8),), "dp=2")


class Two(NamedTuple):
    first: Tensor
    other: Tensor


@sw.register_op("b d ~1 -> b d")
def added(xs: list[Tensor], factor: float = 0.5) -> Tensor:
    return sum(xs[1:], xs[0]) * factor


@sw.register_op("b d ~1 -> b d")
def added_all(*xs: Tensor) -> Tensor:
    return sum(xs[1:], xs[0])


class Lists(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        up = added([up, up.tanh(), up.sin()]) + added(Two(up, up.cos())) + added_all(up, up.relu())
        return self.down(up).square().mean()


@pytest.mark.parametrize("plan", PLANS)
def test_lists_of_tensors_have_one_term_and_are_checked_without_inputs(plan):
    torch.manual_seed(0)
    compare(Lists(), (torch.randn(4, 6),), plan)


def test_somebody_elses_function_is_registered_by_its_path():
    original = third_party.standardized
    actual = sw.register_op("b d^ -> b d^", "tests.third_party:standardized", shapes=lambda x, eps: x.shape)
    try:
        assert third_party.standardized is actual
        assert imported_before is actual, "modules that had imported it by name have the new one"
        graph = capture(Calls(third_party.standardized), (torch.randn(4, 8),)).graph
        assert "call.tests.third_party.standardized" in [op.target for op in graph.ops]
        again = sw.register_op("tests.third_party:standardized", shapes=lambda x, eps: x.shape)
        assert again is third_party.standardized
        torch.manual_seed(0)
        compare(Calls(third_party.standardized), (torch.randn(4, 8),), "dp=2")
    finally:
        third_party.standardized = globals()["imported_before"] = original


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("no_such_package:f", "No module named 'no_such_package'"),
        ("tests.third_party:missing", "has no attribute 'missing'"),
        ("standardized", "write it as 'package.module:function'"),
    ],
)
def test_a_path_that_leads_nowhere_is_an_error(path, reason):
    with pytest.raises(RuleError, match=reason):
        sw.register_op("b d -> b d", path)

"""What a registered function returns beside tensors: fixed where it follows from shapes, refused where it can't."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.errors import CaptureError
from tests.parity.threaded import compare


@sw.register_op("b d -> b d")
def flagged(x: Tensor) -> tuple[Tensor, bool, None, str]:
    return x * 2, x.shape[1] > 3, None, "relu"


@sw.register_op()
def nested(x: Tensor) -> dict[str, Any]:
    return {"double": x * 2, "times": 3, "rest": [x + 1, (x - 1, 2.5)]}


class Pair(NamedTuple):
    value: Tensor
    wide: bool


@sw.register_op()
def paired(x: Tensor) -> Pair:
    return Pair(x.sin(), x.shape[-1] > 100)


@dataclass
class Scaled:
    value: Tensor
    scale: float


@sw.register_op()
def scaled(x: Tensor) -> Scaled:
    return Scaled(x.cos(), 0.5)


class Counted(torch.autograd.Function):
    """Not registered; its gradient is made up."""

    @staticmethod
    def forward(ctx, x):
        return x * 2, 7, None

    @staticmethod
    def backward(ctx, gradient, *_):
        return 5 * gradient


def by_flag(x: Tensor) -> Tensor:
    y, wide, nothing, name = flagged(x)
    assert nothing is None
    y = torch.relu(y) if name == "relu" else y
    return y * 3 if wide else y


def by_nest(x: Tensor) -> Tensor:
    actual = nested(x)
    first, (other, factor) = actual["rest"]
    return actual["double"] * actual["times"] + first * factor - other


def by_name(x: Tensor) -> Tensor:
    actual, other = paired(x), scaled(x)
    return (actual.value if actual.wide else -actual.value) + other.value * other.scale


def by_count(x: Tensor) -> Tensor:
    y, times, nothing = Counted.apply(x)
    return y * times if nothing is None else y


class Net(nn.Module):
    def __init__(self, run: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.run = nn.Linear(8, 8), nn.Linear(8, 4), run

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.run(self.first(x))).square().mean()


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
@pytest.mark.parametrize("run", [by_flag, by_nest, by_name, by_count])
def test_numbers_beside_tensors_are_those_that_the_function_returns(run, plan):
    torch.manual_seed(0)
    compare(Net(run), (torch.randn(4, 8),), plan)


@sw.register_op()
def decided(x: Tensor) -> tuple[Tensor, bool]:
    return x * 2, x.sum().item() > 0


@sw.register_op()
def measured(x: Tensor) -> tuple[Tensor, float]:
    return x * 2, float(x.sum())


@sw.register_op()
def configured(x: Tensor) -> tuple[Tensor, object]:
    return x * 2, object()


class Listed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2, [x * 3]

    @staticmethod
    def backward(ctx, gradient, *_):
        return gradient


REFUSED = {
    "decided returns a number that depends on data": lambda x: decided(x)[0] if decided(x)[1] else x,
    r"measured can't run on tensors without values .*shapes=": lambda x: measured(x)[0],
    "configured returns an object of type object": lambda x: configured(x)[0],
    "Listed returns tensors inside of a list": lambda x: Listed.apply(x)[0],
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_can_not_be_fixed_is_refused_with_the_line(reason):
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(Net(REFUSED[reason]), (torch.randn(4, 8),))
    assert f"{__file__}:" in str(caught.value)

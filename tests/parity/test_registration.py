"""What a forward registers in its first call: there before, or refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.parallelize import parallelize

CALLS = [torch.linspace(-1, 1, 8).view(2, 4), torch.ones(2, 4), torch.linspace(3, -2, 8).view(2, 4)]


class Lazy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.linear = nn.Linear(4, 4)
        self.inner.register_buffer("mask", None)


class Filled(Lazy):
    """A buffer that is None takes the statistics of the first batch."""

    def forward(self, x):
        if self.inner.mask is None:
            self.inner.mask = x.detach().mean(0)
        return (self.linear(x) * self.inner.mask).sum()


class Registered(Lazy):
    def forward(self, x):
        if self.inner.mask is None:
            self.inner.register_buffer("mask", x.detach().abs().amax(0))
        return (self.linear(x) * self.inner.mask).sum()


class Parametrised(Lazy):
    def forward(self, x):
        if not hasattr(self.inner, "scale"):
            self.inner.scale = nn.Parameter(torch.full((4,), 2.0, device=x.device))
        return (self.linear(x) * self.inner.scale).sum()


KINDS = {Filled: "inner.mask", Registered: "inner.mask", Parametrised: "inner.scale"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("example", [None, (CALLS[0],)])
def test_what_the_first_call_would_register_is_refused(tmp_path, kind, example):
    with pytest.raises(CaptureError, match=rf"forward registers {KINDS[kind]} .*or call the model once"):
        parallelize(kind(), plan="single", example=example, compile={"directory": tmp_path})(CALLS[0])


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_after_a_call_is_right(tmp_path, kind):
    original = kind()
    original(CALLS[0])
    wanted = copy.deepcopy(original)
    model = parallelize(original, plan="single", compile={"directory": tmp_path})
    for x in CALLS:
        torch.testing.assert_close(model(x), wanted(x))
    assert model.state_dict().keys() == wanted.state_dict().keys()

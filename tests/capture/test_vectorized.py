"""`torch.vmap` in a model: ops of whole batches, with the gradients that eager has."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from shardwright.capture import capture
from shardwright.errors import CaptureError
from tests.capture.agreement import agree
from tests.parity.threaded import compare


class Net(nn.Module):
    def __init__(self, function: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8).double(), nn.Linear(8, 8).double()
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(3))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def rows(net: Net, x: Tensor) -> Tensor:
    return net.last(torch.vmap(lambda row: net.first(row).softmax(0) * row.sum())(x))


def ensemble(net: Net, x: Tensor) -> Tensor:
    stacked = {key: torch.stack([dict(e.named_parameters())[key] for e in net.experts]) for key in ("weight", "bias")}
    return torch.vmap(lambda value: functional_call(net.experts[0], value, (x,)))(stacked).mean(0)


def nested(net: Net, x: Tensor) -> Tensor:
    inner = torch.vmap(lambda a, b: {"product": (a * b).sum(), "both": (a, b)}, in_dims=(0, None))
    actual = torch.vmap(inner, in_dims=(None, 0), out_dims=1)(net.first(x), x)
    return net.last(actual["product"] @ actual["both"][0][:, 0] + actual["both"][1][0])


def in_chunks(net: Net, x: Tensor) -> Tensor:
    return net.last(torch.vmap(net.first, chunk_size=2)(x))


def without_gradients(net: Net, x: Tensor) -> Tensor:
    def function(row: Tensor) -> Tensor:
        with torch.no_grad():
            gate = net.first(row).sigmoid()
        return net.first(row) * gate

    return net.last(torch.vmap(function)(x))


@pytest.mark.parametrize("function", [rows, ensemble, nested, in_chunks])
def test_the_graph_computes_what_vmap_does(function):
    torch.manual_seed(0)
    agree(Net(function), torch.randn(4, 8, dtype=torch.float64))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2"])
@pytest.mark.parametrize("function", [rows, without_gradients])
def test_what_is_vmapped_is_split(function, plan):
    torch.manual_seed(0)
    compare(Net(lambda net, x: function(net, x).square().mean()), (torch.randn(4, 8),), plan)


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, lambda f: torch.vmap(torch.func.grad(f))])
def test_derivatives_inside_of_a_model_are_refused_and_leave_nothing_behind(transform):
    net = Net(lambda net, x: net.last(transform(lambda a: net.first(a).tanh().sum())(x)))
    with pytest.raises(CaptureError, match="differentiates inside of the model") as caught:
        capture(net, (torch.randn(4, 8, dtype=torch.float64),))
    assert f"{__file__}:" in str(caught.value)
    assert torch._C._functorch.maybe_current_level() is None

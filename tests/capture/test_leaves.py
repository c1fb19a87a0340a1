"""Parameters, buffers and constants: all of them, each once."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from shardwright.capture import capture
from shardwright.errors import CaptureError

from ..models.zoo import ZOO
from .agreement import agree


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(3, 3, dtype=torch.float64)
        self.unused = nn.Linear(3, 3, dtype=torch.float64)
        self.frozen = nn.Parameter(torch.ones(3, dtype=torch.float64), requires_grad=False)
        self.register_buffer("kept", torch.ones(3, dtype=torch.float64))
        self.register_buffer("lost", torch.ones(3, dtype=torch.float64), persistent=False)
        self.plain = torch.full((3,), 2.0, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) * self.frozen * self.kept * self.lost * self.plain + torch.tensor([1.0, 2.0, 3.0])


def captured():
    return agree(Holds(), torch.randn(2, 3, dtype=torch.float64))


def test_unused_and_frozen_parameters_are_listed():
    graph = captured().graph
    assert {parameter.key: parameter.trainable for parameter in graph.parameters} == {
        "frozen": False, "used.weight": True, "used.bias": True, "unused.weight": True, "unused.bias": True,
    }  # fmt: skip
    unused = next(parameter for parameter in graph.parameters if parameter.key == "unused.weight")
    assert graph.users[unused.value] == ()


def test_buffers_and_constants():
    stored = captured()
    assert {buffer.key: buffer.persistent for buffer in stored.graph.buffers} == {
        "kept": True, "lost": False, "constant.0": False, "constant.1": False,
    }  # fmt: skip
    assert sorted(tensor.tolist() for tensor in stored.constants.values()) == [[1.0, 2.0, 3.0], [2.0, 2.0, 2.0]]


def test_adapters_train_while_the_rest_is_frozen():
    module, args, kwargs = ZOO["lora"](dtype=torch.float64)
    graph = agree(module, *args, **kwargs).graph
    trainable = {parameter.key for parameter in graph.parameters if parameter.trainable}
    assert trainable == {key for key, parameter in module.named_parameters() if parameter.requires_grad}
    assert trainable < {parameter.key for parameter in graph.parameters}


def test_an_input_may_have_a_gradient():
    stored = agree(nn.Tanh(), torch.randn(2, 3, dtype=torch.float64).requires_grad_())
    assert stored.graph.values["input"].gradient
    assert stored.graph.values[stored.graph.outputs[0].value].gradient


class Hides(nn.Module):
    """Makes a tensor behind the back of the trace."""

    def forward(self, x: Tensor) -> Tensor:
        with _disable_current_modes():
            hidden = x.new_ones(3)
        return x * hidden


def test_a_tensor_without_values_is_named_by_its_line():
    with pytest.raises(CaptureError, match=r"test_leaves\.py:\d+\n    return x \* hidden\n.* \[3\] that has no values"):
        capture(Hides(), (torch.ones(2, 3),))

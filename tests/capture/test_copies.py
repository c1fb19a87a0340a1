"""A copied module computes with its own tensors, whatever its attributes are."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import nn

from shardwright.capture import copy_module
from shardwright.errors import InputError
from tests.models.closures import WAYS, ClosureNet, TwoLayers, replaced_forward


@pytest.mark.parametrize("how", WAYS)
def test_a_replaced_forward_of_the_copy_reads_the_copy(how):
    model, x = replaced_forward(how), torch.randn(3, 8)
    copied = copy_module(model)

    copied(x).backward()

    assert torch.equal(copied(x), model(x))
    assert all(p.grad is None for p in model.parameters())
    assert all(p.grad is not None for p in copied.parameters())


def test_functions_that_share_a_variable_share_it_in_the_copy():
    model = TwoLayers()
    layer, count = model.first, 0

    def bump(x):
        nonlocal count
        count += 1
        return layer(x)

    def read():
        return count if layer is not None else -1

    model.bump, model.read = bump, read
    copied = copy_module(model)
    copied.bump(torch.randn(2, 8))

    assert (copied.read(), model.read()) == (1, 0)


def test_a_function_that_reaches_itself():
    model = TwoLayers()
    layer = model.first

    def again(x, times):
        return x if times == 0 else again(layer(x), times - 1)

    model.again = again
    copied = copy_module(model)
    with torch.no_grad():
        copied.first.weight.zero_()
        copied.first.bias.zero_()

    assert torch.equal(copied.again(torch.randn(2, 8), 2), torch.zeros(2, 8))


def test_functions_in_containers_and_objects():
    class Box:
        def __init__(self, function):
            self.function = function

    model = TwoLayers()
    layer = model.first
    model.table = {"a": [lambda: layer.weight], "b": (Box(lambda: layer.bias),)}
    model.weak = weakref.ref(layer)
    copied = copy_module(model)

    assert copied.table["a"][0]() is copied.first.weight
    assert copied.table["b"][0].function() is copied.first.bias
    assert copied.weak() is copied.first
    assert model.table["a"][0]() is layer.weight


def test_what_leads_to_no_module_stays_the_object_that_it_is():
    model = TwoLayers()
    logger = object()
    model.act, model.note = torch.relu, lambda: logger
    copied = copy_module(model)

    assert copied.act is torch.relu
    assert copied.note is model.note


def test_hooks_are_bound_to_the_copy():
    model = ClosureNet()
    head = model.blocks[0]
    seen: list[nn.Module] = []
    head.register_forward_hook(lambda module, args, result: seen.append(head) if False else result + head.norm.bias)
    copied = copy_module(model)

    copied(torch.randn(2, 8)).backward()

    assert model.blocks[0].norm.bias.grad is None


def test_what_can_t_be_copied_is_named():
    module = nn.Sequential(nn.Linear(2, 2))
    module[0].guard = threading.Lock()
    with pytest.raises(InputError, match=r"its attribute 0\.guard, a lock, can't .*keep it outside of the model"):
        copy_module(module)


@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_weight_that_a_hook_computes_is_computed_of_the_copy():
    model, x = nn.utils.weight_norm(nn.Linear(8, 8)), torch.randn(3, 8)
    copied = copy_module(model)

    copied(x).sum().backward()

    assert torch.equal(copied(x), model(x))
    assert copied.weight_g.grad is not None
    assert model.weight_g.grad is None

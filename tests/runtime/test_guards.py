"""Attributes are remembered by value, and looked at quickly."""

from __future__ import annotations

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.frozen_values import ABSENT, freeze
from shardwright.runtime.model.guards import AttributeGuard, why_new


def guarded(**attributes):
    module = nn.Module()
    vars(module).update(attributes)
    carried = []
    guard = AttributeGuard({"": module}, lambda *change: carried.append(change))
    guard.watch(("", name) for name in attributes)
    return module, guard, carried


def test_what_has_not_changed_is_no_state():
    _, guard, carried = guarded(a=1, b=[1.0, {"c": float("nan")}])
    assert guard.state() == guard.state() == ()
    assert carried == []


@pytest.mark.parametrize(("before", "after"), [(1, 2), (1, True), (2, 2.0), (None, 0), ("a", "b"), ((1,), (1, 2))])
def test_another_value_or_another_type_is_a_change(before, after):
    module, guard, carried = guarded(a=before)
    module.a = after
    assert guard.state() != ()
    assert carried == [("", "a", after)]
    module.a = before
    assert guard.state() == ()


def test_a_forward_that_is_replaced_later_is_refused_but_for_that_of_the_model():
    inner, carried = nn.Module(), []
    vars(inner)["forward"] = len
    guard = AttributeGuard({"": nn.Module(), "inner": inner}, lambda *change: carried.append(change))
    guard.watch([("inner", "forward")])
    inner.forward = max
    with pytest.raises(InputError, match="the forward of inner was replaced after the model was parallelized"):
        guard.state()
    model, guard, carried = guarded(forward=len)
    model.forward = max
    assert guard.state() != () and carried == []


def test_an_equal_value_is_none():
    module, guard, carried = guarded(a=1.5, b=SimpleNamespace(c=[1]))
    module.a, module.b = 3.0 / 2, SimpleNamespace(c=[1])
    assert guard.state() == ()
    assert carried == []


def test_a_change_deep_inside_is_seen():
    module, guard, _ = guarded(a=SimpleNamespace(b={"c": [1, {2}]}))
    module.a.b["c"][1].add(3)
    assert guard.state() != ()


def test_an_attribute_that_goes_is_absent():
    module, guard, carried = guarded(a=1)
    del module.a
    assert guard.state() != ()
    assert carried == [("", "a", ABSENT)]


def test_what_leads_to_itself_can_be_frozen():
    ring = SimpleNamespace()
    ring.next = ring
    assert freeze(ring, {}) == freeze(ring, {})


def test_tensors_are_known_by_their_version():
    module, guard, _ = guarded(a=torch.zeros(3))
    module.a.add_(1)
    assert guard.state() != ()


class Settings:
    __slots__ = ("gain",)

    def __init__(self):
        self.gain = [1.0]


class Activation:
    def __init__(self):
        self.gain = [1.0]

    def __call__(self, x):
        return x * self.gain[0]


@pytest.mark.parametrize("kind", [Settings, Activation, type("Both", (Settings, Activation), {})])
def test_objects_with_slots_and_functions_with_attributes_are_looked_into(kind):
    module, guard, _ = guarded(a=[kind()])
    module.a[0].gain[0] = 2.0
    assert guard.state() != ()
    module.a[0].gain = [1.0]
    assert guard.state() == ()


def test_arrays_are_known_by_their_values():
    module, guard, _ = guarded(a={"b": np.ones(3)})
    module.a["b"][1] = 2
    assert guard.state() != ()
    module.a["b"] = np.ones(3)
    assert guard.state() == ()


def test_a_look_at_a_thousand_modules_takes_less_than_a_millisecond():
    """0.2 ms on a quiet core; the bound is for a busy one."""
    config = SimpleNamespace(**{f"k{number}": number for number in range(70)})
    modules = {str(number): nn.BatchNorm1d(4) for number in range(1000)}
    for module in modules.values():
        module.config = config
    guard = AttributeGuard(modules, None)
    guard.watch((path, name) for path in modules for name in ("eps", "momentum", "config"))

    def took():
        start = time.perf_counter()
        guard.state()
        return time.perf_counter() - start

    assert min(took() for _ in range(50)) < 1e-3


def test_what_is_new_in_a_call_is_said():
    def key(method="", modes=(True,), state=(), spec="x", leaves=(((4, 8), torch.float32, False), "1")):
        return (method, modes, state), spec, leaves, "global"

    known = [key()]
    wide = (((8, 8), torch.float32, False), "1")
    assert why_new(known, key(method="loss")) == "it is the first call of loss"
    assert why_new(known, key(spec="x y")) == "it passes other arguments, by their names or nesting"
    assert why_new(known, key(leaves=wide)) == "it passes other shapes, dtypes or requires_grad"
    assert why_new(known, key(modes=(False,))) == "other modules are in train or eval mode"
    assert why_new(known, key(state=(("inner", "gain", 2), ("", "SCALE", 3)))) == "SCALE, inner.gain was changed"
    assert why_new(known, key(leaves=(key()[2][0], "2"))) == "it passes other values"

"""What a forward reads outside of its modules may change later: the program follows, or the change is refused."""

from __future__ import annotations

import argparse
import collections
import contextvars
import os
import random
import sys
import types
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardwright as sw
from shardwright.errors import CaptureError
from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks

from .looped import gradients

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
HERE = sys.modules[__name__]

NUMBER, PAIR, TABLE, TENSOR = 2.0, (1.0, 2.0), {"scale": 2.0, "unread": 0}, torch.ones(8, dtype=torch.float64)
ARGUMENTS, SETTINGS = argparse.Namespace(scale=2.0, step=0), types.ModuleType("settings")
SETTINGS.scale = 2.0
CONTEXT = contextvars.ContextVar("scale", default=2.0)
COUNT, WARNED, KEPT = 0, False, []


def number():
    return NUMBER


class AsClass:
    scale = 2.0


class AsObject:
    scale = 2.0

    def doubled(self):
        return 2 * self.scale

    @property
    def read(self):
        return NUMBER


class Slotted:
    __slots__ = ("scale",)


class Activation:
    def __init__(self):
        self.scale = 2.0

    def __call__(self, x):
        return x * self.scale


class Base(nn.Module):
    gain = 2.0

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.as_class, self.as_object, self.slotted, self.act = AsClass, AsObject(), Slotted(), Activation()
        self.ordered, self.array, self.slotted.scale = collections.OrderedDict(scale=2.0), np.full(8, 2.0), 2.0

    def factor(self):
        return 2.0


class Middle(Base):
    pass


READS = {
    "a global": (lambda self, x: self.layer(x) * NUMBER, (HERE, "NUMBER", 3.0)),
    "a global of a function": (lambda self, x: self.layer(x) * number(), (HERE, "NUMBER", 3.0)),
    "a global of a property": (lambda self, x: self.layer(x) * self.as_object.read, (HERE, "NUMBER", 3.0)),
    "a tuple": (lambda self, x: self.layer(x) * PAIR[1], (HERE, "PAIR", (1.0, 3.0))),
    "a tensor": (lambda self, x: self.layer(x) * TENSOR, (HERE, "TENSOR", 3 * TENSOR)),
    "an item": (lambda self, x: self.layer(x) * TABLE["scale"], (TABLE, "scale", 3.0)),
    "an attribute of a global": (lambda self, x: self.layer(x) * ARGUMENTS.scale, (ARGUMENTS, "scale", 3.0)),
    "a variable of a module": (lambda self, x: self.layer(x) * SETTINGS.scale, (SETTINGS, "scale", 3.0)),
    "a class attribute": (lambda self, x: self.layer(x) * self.gain, (Base, "gain", 3.0)),
    "a class attribute that is overridden": (lambda self, x: self.layer(x) * self.gain, (Middle, "gain", 3.0)),
    "a method": (lambda self, x: self.layer(x) * self.factor(), (Base, "factor", lambda self: 3.0)),
    "a class as config": (lambda self, x: self.layer(x) * self.as_class.scale, (AsClass, "scale", 3.0)),
    "the class of a config": (lambda self, x: self.layer(x) * self.as_object.scale, (AsObject, "scale", 3.0)),
    "a method of a config": (lambda self, x: self.layer(x) * self.as_object.doubled(), (AsObject, "scale", 3.0)),
    "the environment": (
        lambda self, x: self.layer(x) * float(os.environ.get("SHARDWRIGHT_TEST_SCALE", "2")),
        (os.environ, "SHARDWRIGHT_TEST_SCALE", "3"),
    ),
}


def model_with(forward):
    """A model of a class of its own, which no other test has captured."""
    torch.manual_seed(0)
    return type("Net", (Middle,), {"forward": forward})().double()


def change(monkeypatch, owner, name, value):
    if isinstance(owner, dict | os._Environ):
        monkeypatch.setitem(owner, name, value)
    else:
        monkeypatch.setattr(owner, name, value, raising=False)


def programs(model):
    return len(set(map(id, model._entries.values())))


@pytest.mark.parametrize("read", READS)
def test_a_changed_variable_compiles_anew_and_going_back_finds_the_old_program(read, tmp_path):
    forward, changed = READS[read]
    model, original = (
        parallelize(model_with(forward), plan="single", compile={"directory": tmp_path}),
        model_with(forward),
    )
    before = original(X)
    torch.testing.assert_close(model(X), before, rtol=1e-10, atol=0)
    with pytest.MonkeyPatch.context() as patch:
        change(patch, *changed)
        after = original(X)
        assert not torch.allclose(after, before)
        torch.testing.assert_close(model(X), after, rtol=1e-10, atol=0)
    torch.testing.assert_close(model(X), before, rtol=1e-10, atol=0)
    assert programs(model) == 2


IN_PLACE = {
    "slots": (lambda self, x: self.layer(x) * self.slotted.scale, lambda model: setattr(model.slotted, "scale", 3.0)),
    "an object that is called": (lambda self, x: self.act(self.layer(x)), lambda m: setattr(m.act, "scale", 3.0)),
    "an ordered dict": (lambda self, x: self.layer(x) * self.ordered["scale"], lambda m: m.ordered.update(scale=3.0)),
    "an array": (lambda self, x: self.layer(x) * torch.tensor(self.array), lambda model: model.array.fill(3.0)),
}


@pytest.mark.parametrize("what", IN_PLACE)
def test_what_an_attribute_holds_may_change_in_place(what, tmp_path):
    forward, alter = IN_PLACE[what]
    model = parallelize(model_with(forward), plan="single", compile={"directory": tmp_path})
    before = model(X)
    alter(model)
    torch.testing.assert_close(model(X), 1.5 * before, rtol=1e-10, atol=0)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_under_every_plan(plan, tmp_path, monkeypatch):
    def forward(self, x):
        return (self.layer(torch.tanh(self.layer(x))) * NUMBER).square().mean()

    def train(model, meet=lambda: None):
        seen = []
        for value in (2.0, 3.0):
            meet()  # threads share the variable
            HERE.NUMBER = value
            meet()
            model.zero_grad()
            loss = model(X)
            loss.backward()
            seen += [loss.detach(), *gradients(model)]
        return seen

    monkeypatch.setattr(HERE, "NUMBER", 2.0)
    wanted = train(model_with(forward))
    models = [model_with(forward) for _ in range(2)]

    def run(rank):
        return train(parallelize(models[rank], plan=plan, compile={"directory": tmp_path}), dist.barrier)

    assert not torch.allclose(wanted[0], wanted[3])
    for result in run_ranks(2, run):
        for mine, other in zip(result, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-10, atol=1e-10)


def test_a_closure_variable_of_the_forward_and_of_a_function_that_is_kept(tmp_path):
    scale = 2.0

    def forward(self, x):
        return self.kept(x) * scale

    model = model_with(forward)
    model.kept = lambda x, model=model: model.layer(x) * scale
    compiled = parallelize(model, plan="single", compile={"directory": tmp_path})
    before = compiled(X)
    scale = 3.0
    torch.testing.assert_close(compiled(X), 2.25 * before, rtol=1e-10, atol=0)


def test_a_context_variable(tmp_path):
    model = parallelize(
        model_with(lambda self, x: self.layer(x) * CONTEXT.get()), plan="single", compile={"directory": tmp_path}
    )
    before = model(X)
    token = CONTEXT.set(3.0)
    try:
        torch.testing.assert_close(model(X), 1.5 * before, rtol=1e-10, atol=0)
    finally:
        CONTEXT.reset(token)


def test_a_tensor_that_is_written_to(tmp_path):
    table = torch.ones(8, dtype=torch.float64)
    model = parallelize(
        model_with(lambda self, x: self.layer(x) * table.clone()), plan="single", compile={"directory": tmp_path}
    )
    before = model(X)
    table.mul_(3)
    torch.testing.assert_close(model(X), 3 * before, rtol=1e-10, atol=0)


def test_what_is_not_read_of_a_namespace_compiles_nothing(tmp_path, monkeypatch):
    model = parallelize(
        model_with(READS["an attribute of a global"][0]), plan="single", compile={"directory": tmp_path}
    )
    model(X)
    monkeypatch.setattr(ARGUMENTS, "step", 7)
    monkeypatch.setitem(TABLE, "unread", 7)
    model(X)
    assert programs(model) == 1


@pytest.mark.parametrize("setting", ["gradients", "default dtype", "autocast"])
def test_settings_of_torch(setting, tmp_path):
    def forward(self, x):
        x = self.layer(x) * torch.full((8,), 1 / 3)
        return x if torch.is_grad_enabled() else 2 * x

    model, original = (
        parallelize(model_with(forward), plan="single", compile={"directory": tmp_path}),
        model_with(forward),
    )
    model(X)
    try:
        if setting == "gradients":
            torch.set_grad_enabled(False)
        elif setting == "default dtype":
            torch.set_default_dtype(torch.float64)
        else:
            torch.set_autocast_enabled("cpu", True)
        output, wanted = model(X), original(X)
    finally:
        torch.set_grad_enabled(True)
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)
    assert output.dtype == wanted.dtype
    torch.testing.assert_close(output, wanted, rtol=1e-10, atol=0)


def test_a_forward_that_counts_in_a_global_is_refused(tmp_path):
    def forward(self, x):
        global COUNT
        COUNT += 1
        return self.layer(x) * COUNT

    with pytest.raises(CaptureError, match=r"COUNT is a variable outside of the model \(.*test_variables\.py:\d+\)"):
        parallelize(model_with(forward), plan="single", compile={"directory": tmp_path})(X)


def test_a_forward_that_keeps_a_tensor_in_a_global_is_refused(tmp_path):
    def forward(self, x):
        KEPT.append(x.detach())
        return self.layer(x)

    try:
        with pytest.raises(CaptureError, match=r"KEPT is a variable.*stores a tensor of its call.*Return it"):
            parallelize(model_with(forward), plan="single", compile={"directory": tmp_path})(X)
    finally:
        KEPT.clear()


def test_a_warning_that_is_given_once_is_fine(tmp_path, monkeypatch):
    def forward(self, x):
        global WARNED
        if not WARNED:
            WARNED = True
        return self.layer(x)

    monkeypatch.setattr(HERE, "WARNED", False)
    model = parallelize(model_with(forward), plan="single", compile={"directory": tmp_path})
    torch.testing.assert_close(model(X), model_with(forward)(X), rtol=1e-10, atol=0)
    model(X)
    assert WARNED and programs(model) == 1


DRAWS = [lambda: random.random(), lambda: np.random.rand(), lambda: random.randint(1, 9)]


@pytest.mark.parametrize("draw", DRAWS)
def test_a_number_drawn_by_python_is_refused(draw, tmp_path):
    model = parallelize(
        model_with(lambda self, x: self.layer(x) * draw()), plan="single", compile={"directory": tmp_path}
    )
    drawn = r"draws a number from (numpy\.)?random \(.*test_variables\.py:\d+\).*sw\.opaque"
    with pytest.raises(CaptureError, match=drawn):
        model(X)


@pytest.mark.parametrize("chance", [0.0, 1.0])
def test_a_draw_that_decides_nothing_is_fine(chance, tmp_path):
    def forward(self, x):
        return x if random.random() < self.chance and np.random.uniform() < self.chance else self.layer(x)

    model = model_with(forward)
    model.chance = chance
    assert parallelize(model, plan="single", compile={"directory": tmp_path})(X).shape == X.shape


def test_an_opaque_submodule_may_draw(tmp_path):
    class Noisy(nn.Module):
        def forward(self, x):
            return x * random.randint(2, 1_000_000)

    model = model_with(lambda self, x: self.noisy(self.layer(x)))
    model.noisy = sw.opaque(Noisy())
    compiled = parallelize(model, plan="single", compile={"directory": tmp_path})
    assert not torch.equal(compiled(X), compiled(X))


def test_a_namespace_of_the_model(tmp_path):
    model = model_with(lambda self, x: self.layer(x) * self.config.scale)
    model.config = SimpleNamespace(scale=2.0)
    compiled = parallelize(model, plan="single", compile={"directory": tmp_path})
    before = compiled(X)
    compiled.config.scale = 3.0
    torch.testing.assert_close(compiled(X), 1.5 * before, rtol=1e-10, atol=0)


class Scaling(torch.autograd.Function):
    factor = 2.0

    @staticmethod
    def forward(ctx, x):
        return x * Scaling.factor

    @staticmethod
    def backward(ctx, gradient):
        return gradient * Scaling.factor


class ScaledByFunction(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        return Scaling.apply(self.linear(x)).sum()


def test_what_an_autograd_function_reads_is_read_when_it_runs(tmp_path, monkeypatch):
    model = parallelize(ScaledByFunction(), plan="single", compile={"directory": tmp_path})
    x = torch.ones(4, 8)
    before = model(x)
    monkeypatch.setattr(Scaling, "factor", 6.0)
    assert torch.allclose(model(x), before * 3)
    assert len(model._entries) == 1  # the same program

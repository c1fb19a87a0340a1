"""A float that is passed to forward is an input from its second value on, where the model only computes with it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from shardwright.errors import CaptureError
from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks

from .looped import gradients
from .threaded import world_of

X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
VALUES = (0.3, 0.7, -1.5, 0.3, 2.0, 0.0)


class Weighted(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x, weight, *, power=2.0):
        x = torch.tanh(self.first(x)) * weight + (1 - weight) * x
        y = self.second(x)
        return y.abs().pow(power).mean() + weight * x.square().mean()


class Decides(Weighted):
    def forward(self, x, weight):
        return self.second(self.first(x)).mean() * (2.0 if weight > 0.5 else weight)


class Asks(Weighted):
    def forward(self, x, weight):
        x = x * 2 if isinstance(weight, float) else x
        return self.first(x).mean() * weight


class Leaves(Weighted):
    def forward(self, x, weight):
        return self.first(x).mean() * math.exp(weight)


def follow(make, plan, folder, dtype=torch.float64, tolerance=1e-10):
    def steps(model):
        seen = []
        for value in VALUES:
            model.zero_grad()
            loss = model(X.to(dtype), value)
            loss.backward()
            seen += [loss.detach(), *gradients(model)]
        return seen

    def seeded():
        torch.manual_seed(0)
        return make().to(dtype)

    wanted = steps(seeded())
    models = [seeded() for _ in range(world_of(plan))]

    def run(rank):
        model = parallelize(models[rank], plan=plan, compile={"directory": folder})
        return steps(model), len(set(map(id, model._entries.values())))

    counts = set()
    for seen, count in run_ranks(world_of(plan), run):
        for mine, other in zip(seen, wanted, strict=True):
            if mine.shape == other.shape:
                torch.testing.assert_close(mine, other, rtol=tolerance, atol=tolerance)
            else:
                assert not mine.numel()
                assert not other.any()
        counts.add(count)
    return counts


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "pp=2"])
def test_six_values_take_two_programs(plan, tmp_path):
    assert follow(Weighted, plan, tmp_path) == {2}


def test_in_float32_too(tmp_path):
    assert follow(Weighted, "dp=2", tmp_path, torch.float32, 1e-5) == {2}


@pytest.mark.parametrize("make", [Decides, Asks, Leaves])
def test_a_number_that_decides_is_a_constant(make, tmp_path):
    assert follow(make, "single", tmp_path) == {len(set(VALUES))}


def test_a_keyword_is_an_input_as_well(tmp_path):
    model, original = (
        parallelize(Weighted().double(), plan="single", compile={"directory": tmp_path}),
        Weighted().double(),
    )
    model(X, 0.5)
    original.load_state_dict(model.full_state_dict())
    for power in (1.0, 2.0, 3.0, 1.5):
        torch.testing.assert_close(model(X, 0.5, power=power), original(X, 0.5, power=power), rtol=1e-10, atol=1e-10)
    assert len(set(map(id, model._entries.values()))) == 3


def test_a_check_of_the_number_is_not_lost(tmp_path):
    class Checked(Weighted):
        def forward(self, x, weight):
            assert weight >= 0
            return self.first(x).mean() * weight

    model = parallelize(Checked().double(), plan="single", compile={"directory": tmp_path})
    for weight in (0.5, 1.0, 2.0):
        model(X, weight)
    with pytest.raises(CaptureError, match="assert weight >= 0"):
        model(X, -1.0)

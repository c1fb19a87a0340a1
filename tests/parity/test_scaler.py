"""A loss scaler in the ordinary loop: an infinity in one rank's shard, and all ranks skip the step."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch

from shardwright.layout import local_region
from shardwright.parallelize import parallelize
from shardwright.runtime.model.access import state_of
from shardwright.runtime.model.parallel_model import ParallelModel
from shardwright.runtime.parameters.full_tensors import coordinates
from shardwright.runtime.parameters.sharded import Untouched
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import parameters
from .threaded import world_of

PLANS = ("dp=2", "tp=2", "zero1=2", "zero2=2", "zero3=2", "dp=2,tp=2", "pp=2", "pp=2,tp=2")
LOST = 1  # the step in which the gradient of one element is infinite


def plant(model, key):
    """Make the last element of a gradient infinite, wherever it is."""
    if not isinstance(model, ParallelModel):
        model.get_parameter(key).grad.view(-1)[-1] = math.inf
        return 1
    holding = state_of(model)
    parameter = holding.parameters.get(key)
    if parameter is None:
        return 0
    last = tuple(size - 1 for size in parameter.spec.shape)
    leaf = parameter if parameter.shard is None else parameter.shard
    shard = local_region(leaf.spread, parameter.spec.shape, holding.groups.mesh.sizes, coordinates(holding.groups))
    for offset, at, sizes in shard.boxes:
        if all(start <= place < start + size for start, place, size in zip(offset, last, sizes, strict=True)):
            inside = tuple(a + place - start for a, place, start in zip(at, last, offset, strict=True))
            gradient = leaf.grad
            with Untouched():
                gradient[inside] = math.inf
            return 1
    return 0


def loop(model, optimizer, case, key, before):
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=100)
    seen, planted = [], 0
    for step in range(4):
        handle = []
        if step == LOST and before:
            planted += poison(model, key, handle)
        loss = model(*case.args, **case.kwargs)
        scaler.scale(loss).backward()
        for value in handle:
            value.remove()
        if step == LOST and not before:
            planted += plant(model, key)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen += [loss.detach(), torch.tensor(scaler.get_scale())]
    return [*seen, *parameters(model)], planted


def poison(model, key, handles):
    """An infinity that comes in backward: a hook on one parameter, on the ranks that hold it."""
    stored = dict(model.named_parameters()).get(key)
    if stored is None:
        return 0
    handles.append(stored.register_hook(lambda gradient: torch.full_like(gradient, math.inf)))
    return 1


def adamw(fused=False):
    return lambda value: torch.optim.AdamW(value, lr=1e-2, fused=fused)


def run(plan, key, before, make, **options):
    case = ZOO["mlp"](dtype=torch.float64)
    wanted, _ = loop(case.module, make(case.module.parameters()), case, key, before)
    cases, folder = [ZOO["mlp"](dtype=torch.float64) for _ in range(world_of(plan))], tempfile.mkdtemp()

    def rank(number):
        stored = cases[number]
        instance = make(stored.module.parameters())
        model, optimizer = parallelize(stored.module, instance, plan=plan, **grouped(directory=folder, **options))
        return loop(model, optimizer, stored, key, before)

    results = run_ranks(world_of(plan), rank)
    scales = [float(expected) for expected in wanted[1:8:2]]
    assert scales == [1024.0, 512.0, 512.0, 512.0]
    for mine, _ in results:
        for number, (value, other) in enumerate(zip(mine, wanted, strict=True)):
            assert float((value - other).abs().max()) <= 1e-9, number
    return [planted for _, planted in results]


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("plan", [plan for plan in PLANS if "pp" not in plan])
def test_an_infinity_undivided_is_seen_by_all(plan, fused):
    planted = run(plan, "up.weight", False, adamw(fused))
    assert sum(planted) >= 1
    if plan != "dp=2":
        assert 0 in planted  # somebody did not see it


@pytest.mark.parametrize("plan", ["pp=2", "pp=2,tp=2"])
def test_an_infinity_in_one_stage_is_seen_by_all(plan):
    assert 0 in run(plan, "down.weight", True, adamw())

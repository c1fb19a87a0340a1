"""Float32 masters are what a checkpoint has: saved under one plan and precision, loaded under another."""

from __future__ import annotations

import pytest
import torch

import shardwright as sw
from shardwright.ema import EMA
from tests.models.nets import RATE, Exact
from tests.models.nets import SIGNS as X

PLANS = ("zero1=2", "zero3=2", "tp=2", "pp=2")


def make_run(plan, folder, precision="bf16"):
    net = Exact()
    optimizer = torch.optim.SGD(net.parameters(), lr=RATE, momentum=0.5)
    model, optimizer = sw.parallelize(
        net, optimizer, plan=plan, example=X, compile={"directory": folder}, precision=precision
    )
    return model, optimizer, EMA(model, 0.5)


def steps(run, count):
    model, optimizer, ema = run
    for _ in range(count):
        model(X).backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()


def values(run):
    with run[2].swapped():
        averages = run[0].full_state_dict()
    return run[0].full_state_dict(), averages


def saved_and_loaded(rank, folder):
    """Saved after two steps under one plan, and loaded and trained on under each."""
    first = make_run(PLANS[0], folder)
    steps(first, 2)
    sw.save(f"{folder}/saved", first[0], first[1], extra={"ema": first[2]})
    steps(first, 1)
    actual = [values(first)]
    for plan in PLANS[1:]:
        run = make_run(plan, folder)
        sw.load(f"{folder}/saved", run[0], run[1], extra={"ema": run[2]})
        steps(run, 1)
        actual.append(values(run))
    wide = make_run("tp=2", folder, "fp32")
    sw.load(f"{folder}/saved", wide[0], wide[1])
    return actual, wide[0].full_state_dict()


@pytest.mark.timeout(300)
def test_from_plan_to_plan_and_to_another_precision(pools, tmp_path):
    alone = make_run("single", tmp_path)
    steps(alone, 2)
    half = alone[0].full_state_dict()
    steps(alone, 1)
    wanted = values(alone)
    assert not torch.equal(wanted[0]["up"], wanted[0]["up"].bfloat16().float())
    for result, wide in pools[2].run(saved_and_loaded, str(tmp_path), timeout=240):
        for plan, mine in zip(PLANS, result, strict=True):
            for value, other in zip(mine, wanted, strict=True):
                assert all(torch.equal(value[key], item) for key, item in other.items()), plan
        assert all(torch.equal(wide[key], item) for key, item in half.items())

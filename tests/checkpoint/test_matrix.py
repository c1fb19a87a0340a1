"""Saved under each plan, loaded under each: the next steps are those without the stop."""

from __future__ import annotations

import pytest

import shardwright as sw

from .runs import OPTIMIZERS, assert_same, forget, make_run, steps, values

RANKS = {"plain": 1, "single": 1, "dp=2": 2, "tp=2": 2, "zero3=2": 2, "pp=2": 2, "pp=2,tp=2": 4}
BEFORE, AFTER = 3, 2

_kept = {}  # the runs of this process: to compile them once is enough


def save_all(rank, plan, folder):
    """One run for each optimizer, saved after some steps."""
    for kind in OPTIMIZERS:
        run = make_run("gpt", kind, None if plan == "plain" else plan, folder)
        _kept[plan, kind] = run
        steps(run, "gpt", BEFORE)
        sw.save(f"{folder}/{kind}/{plan}", run[0], run[1], schedulers=run[2], step=BEFORE, data={"row": 12})


def sources(plan, kind):
    """The checkpoints that are loaded under a plan; of others than AdamW a few, since what they keep is cut alike."""
    plans = list(RANKS)
    return plans if kind == "adamw" else dict.fromkeys(("plain", plan, plans[plans.index(plan) - 1]))


def load_all(rank, plan, folder):
    """What goes on from each checkpoint: the losses and the parameters then."""
    by_name = {}
    for kind in OPTIMIZERS:
        run = _kept[plan, kind]
        for saved in sources(plan, kind):
            forget(run)
            loaded = sw.load(f"{folder}/{kind}/{saved}", run[0], run[1], schedulers=run[2])
            assert (loaded.step, loaded.data) == (BEFORE, {"row": 12})
            by_name[kind, saved] = steps(run, "gpt", AFTER), values(run[0])
    return by_name


def run_on(pools, plan, fn, folder):
    size = RANKS[plan]
    return [fn(0, plan, folder)] if size == 1 else pools[size].run(fn, plan, folder, timeout=240)


@pytest.fixture(scope="module")
def saved(pools, tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("matrix"))
    for plan in RANKS:
        run_on(pools, plan, save_all, folder)
    return folder


@pytest.fixture(scope="module")
def wanted():
    """The runs that did not stop."""
    by_name = {}
    for kind in OPTIMIZERS:
        run = make_run("gpt", kind, None, "")
        steps(run, "gpt", BEFORE)
        by_name[kind] = steps(run, "gpt", AFTER), values(run[0])
    return by_name


@pytest.mark.parametrize("plan", RANKS)
def test_the_next_steps_are_those_without_the_stop(pools, saved, wanted, plan):
    for mine in run_on(pools, plan, load_all, saved):
        assert {kind for kind, _ in mine} == set(OPTIMIZERS)
        for (kind, source), (losses, parameters) in mine.items():
            assert losses == pytest.approx(wanted[kind][0], rel=1e-9), (kind, source)
            assert_same(parameters, wanted[kind][1])

"""Saved under an axis that is two, loaded where it is one: the next steps are those without the stop."""

from __future__ import annotations

import pytest

import shardwright as sw

from .runs import assert_same, forget, make_run, steps, values

MODEL, KIND = "gqa_fused", "adamw"  # four heads of queries, two of keys


def save(rank, folder):
    run = make_run(MODEL, KIND, "tp=4", folder)
    assert str(run[0].plan.mesh) == "tp0=2 x tp1=2"
    steps(run, MODEL, 2)
    sw.save(f"{folder}/saved", run[0], run[1], schedulers=run[2], step=2)


def load(rank, folder):
    run = make_run(MODEL, KIND, "tp=2", folder)
    forget(run)
    sw.load(f"{folder}/saved", run[0], run[1], schedulers=run[2])
    return steps(run, MODEL, 2), values(run[0])


def test_heads_that_pairs_of_ranks_hold_are_saved_once_and_load_under_another_axis(pools, tmp_path):
    alone = make_run(MODEL, KIND, None, "")
    steps(alone, MODEL, 2)
    losses, parameters = steps(alone, MODEL, 2), values(alone[0])

    pools[4].run(save, str(tmp_path), timeout=120)

    for mine in pools[2].run(load, str(tmp_path), timeout=120):
        assert mine[0] == pytest.approx(losses, rel=1e-9)
        assert_same(mine[1], parameters)

"""Fronts hold everything that could be best, and nothing twice."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.search import Problem
from shardwright.plan.search import pareto as module
from shardwright.plan.search.dual import Dual
from shardwright.plan.search.elimination import eliminate
from shardwright.plan.search.pareto import ParetoSearch, Stopped, TooMany, nondominated, spread
from tests.plan.search.drawn import PHASES, best_time, everything, layered, repeat


def plain_front(group: np.ndarray, values: np.ndarray) -> set:
    rows = {(g, *map(float, row)) for g, row in zip(group.tolist(), values, strict=True)}
    return {a for a in rows if not any(b != a and b[0] == a[0] and all(np.array(b) <= np.array(a)) for b in rows)}


@settings(max_examples=80, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.sampled_from([2, 5, 64]))
def test_what_is_not_dominated_is_kept_once(seed, forms, block):
    random = np.random.default_rng(seed)
    group = random.integers(0, 3, 60)
    values = random.integers(0, 6, (60, forms)).astype(float)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK", block)
        kept, _ = nondominated(group, values)

    rows = [(int(group[i]), *map(float, values[i])) for i in kept]
    assert len(rows) == len(set(rows))
    assert set(rows) == plain_front(group, values)
    assert sorted(group[kept]) == list(group[kept])


def test_thinning_keeps_the_ends_of_every_group():
    kept = spread(np.array([0] * 10 + [1] * 3 + [2] * 5), 4)

    assert kept.astype(int).tolist() == [1, 0, 0, 1, 0, 0, 1, 0, 0, 1, 1, 1, 1, 1, 0, 1, 1, 1]


def fronts_of(problem) -> tuple[Dual, ParetoSearch]:
    dual = Dual(problem, eliminate(problem), limited=math.isfinite(problem.limit))
    for _ in dual.steps():
        pass
    return dual, ParetoSearch(dual)


@settings(max_examples=40, deadline=None)
@given(layered(limited=True))
def test_the_best_is_found_when_the_gap_reaches_it_and_only_then_is_it_sure(problem):
    truth = best_time(problem)
    if math.isinf(truth):
        return
    dual, fronts = fronts_of(problem)

    point = fronts.search(truth - dual.bound, lambda: False)
    less = fronts.search((truth - dual.bound) / 2, lambda: False)

    assert point is not None and point.time == pytest.approx(truth)
    assert problem.fits(point.memory)
    assert less is None or less.time >= truth - 1e-8


def test_equal_parts_that_nothing_joins_are_walked_apart():
    problem = repeat(np.random.default_rng(0), 4, 1, 3, PHASES[1])
    alone = tuple(factor for factor in problem.factors if len(factor.variables) == 1)
    apart = Problem(problem.sizes, alone, problem.blocks, PHASES[1], problem.memory)
    dual, fronts = fronts_of(apart)
    truth = everything(apart)[1].min()

    point = fronts.search(truth - dual.bound, lambda: False)

    assert point is not None and point.time == pytest.approx(truth)


def test_too_much_is_given_up(monkeypatch):
    problem = repeat(np.random.default_rng(0), 8, 3, 3, PHASES[1])
    _, fronts = fronts_of(problem)
    monkeypatch.setattr(module, "MOST_ROWS", 1000)

    with pytest.raises(TooMany, match="1,000"):
        fronts.search(1e9, lambda: False)


def test_it_stops_when_told():
    _, fronts = fronts_of(repeat(np.random.default_rng(0), 4, 3, 3, PHASES[1]))

    with pytest.raises(Stopped):
        fronts.search(1.0, lambda: True)

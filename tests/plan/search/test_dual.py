"""The dual's bound holds, and is the best that weights can give."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from shardwright.plan.search.dual import Dual
from shardwright.plan.search.elimination import eliminate
from tests.plan.search.drawn import MEMORY, best_time, everything, problems, repeat, with_limit


def run(problem) -> Dual:
    dual = Dual(problem, eliminate(problem), limited=math.isfinite(problem.limit))
    for _ in dual.steps():
        pass
    return dual


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_bound_holds_and_its_ceiling_is_reached(problem):
    dual = run(problem)

    assert dual.bound <= best_time(problem) + 1e-8
    assert math.isinf(dual.bound) or dual.closed


@settings(max_examples=80, deadline=None)
@given(problems())
def test_the_bound_is_the_best_of_all_mixtures(problem):
    """No weights on a grid give a better bound, when everything is tried."""
    if math.isinf(best_time(problem)):
        return
    dual = run(problem)
    states, _, _ = everything(problem)
    resources = np.array([problem.point(each).resources for each in states])
    random = np.random.default_rng(0)

    for _ in range(20):
        mus = [random.dirichlet(np.ones(len(forms))) for forms in problem.phases]
        weights = sum(mu @ np.array(forms) for mu, forms in zip(mus, problem.phases, strict=True))
        price = random.exponential() if dual.limited else 0.0
        lagrangean = resources @ (weights + price * MEMORY) - (price * problem.limit if dual.limited else 0.0)
        assert lagrangean.min() <= dual.bound + 1e-6 * max(1.0, abs(dual.bound))


def test_points_are_what_was_solved_for():
    problem = with_limit(repeat(np.random.default_rng(0), 5, 3, 3), 0.3)
    dual = run(problem)

    value = min(cut @ np.concatenate([[1.0], dual.best]) for cut in dual.cuts)

    assert value == pytest.approx(dual.bound)

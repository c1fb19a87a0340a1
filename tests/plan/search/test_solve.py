"""The search finds the best there is, says how near it is, and ends when told."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from shardwright.plan.search import Factor, Problem, relax, solve
from shardwright.plan.search import solve as module
from tests.plan.search.drawn import MEMORY, PHASES, at_most, best_time, everything, layered, problems, repeat

NEAR = {"rel": 1e-8, "abs": 1e-8}


def check(problem: Problem) -> None:
    truth = best_time(problem)
    least = everything(problem)[2].min(initial=math.inf)

    found = solve(problem, aim=0.0)

    assert found.time == pytest.approx(truth, **NEAR)
    assert found.bound <= truth + 1e-8
    assert found.exact and not found.stopped
    assert found.least_memory == pytest.approx(least)
    if found.states is None:
        assert truth == math.inf
    else:
        point = problem.point(np.array(found.states))
        assert (point.time, point.memory) == pytest.approx((found.time, found.memory))
        assert problem.fits(found.memory)


@settings(max_examples=400, deadline=None)
@given(problems())
def test_any_graph_is_solved_as_if_everything_was_tried(problem):
    check(problem)


@settings(max_examples=100, deadline=None)
@given(layered())
def test_equal_layers_are_solved_as_if_everything_was_tried(problem):
    check(problem)

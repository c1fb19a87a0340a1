"""The integer programme and the search agree, on small problems and on ones that nobody could try out."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from shardwright.plan.search import solve, solve_ilp
from tests.plan.search.drawn import PHASES, at_most, best_time, problems, repeat, wide_problem


@settings(max_examples=40, deadline=None)
@given(problems())
def test_small_problems_are_solved_as_if_everything_was_tried(problem):
    truth = best_time(problem)

    solution = solve_ilp(problem)

    assert solution.time == pytest.approx(truth, rel=1e-6, abs=1e-6)
    assert (solution.states is None) == math.isinf(truth)
    assert solution.states is None or problem.fits(solution.memory)


@pytest.mark.parametrize(
    ("phases", "part", "hub"),
    [(0, None, False), (0, 0.6, True), (0, 0.15, False), (1, 0.15, False), (2, None, True), (2, 0.6, False)],
)
def test_the_search_finds_the_same_on_twelve_layers(phases, part, hub):
    problem = repeat(np.random.default_rng(3), 12, 3, 2, PHASES[phases], hub=hub, forbid=0.05)
    if part is not None:
        free = solve(problem)
        problem = at_most(problem, free.least_memory + part * (free.memory - free.least_memory))

    solution, other = solve(problem, aim=0.0), solve_ilp(problem)

    assert solution.time == pytest.approx(other.time, rel=1e-6)
    assert solution.exact and other.exact


def test_the_search_finds_the_same_on_sixty_variables():
    problem = repeat(np.random.default_rng(4), 15, 4, 2, PHASES[2])

    assert solve(problem, aim=0.0).time == pytest.approx(solve_ilp(problem).time, rel=1e-6)


def test_told_to_stop_it_says_so():
    solution = solve_ilp(wide_problem(12, 6), stop=lambda: True)

    assert solution.stopped and not solution.exact

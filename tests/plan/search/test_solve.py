"""The search finds the best there is, says how near it is, and ends when told."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from hypothesis import given, settings

from shardwright.errors import PlanError
from shardwright.plan.search import CostFactor, Problem, elimination, relax, solve
from tests.plan.search.drawn import (
    MEMORY,
    PHASES,
    at_most,
    best_time,
    everything,
    layered,
    problems,
    repeat,
    wide_problem,
)

NEAR = {"rel": 1e-8, "abs": 1e-8}


def check(problem: Problem) -> None:
    truth = best_time(problem)
    least = everything(problem)[2].min(initial=math.inf)

    solution = solve(problem, aim=0.0)

    assert solution.time == pytest.approx(truth, **NEAR)
    assert solution.bound <= truth + 1e-8
    assert solution.exact and not solution.stopped
    assert solution.least_memory == pytest.approx(least)
    if solution.states is None:
        assert truth == math.inf
    else:
        point = problem.point(np.array(solution.states))
        assert (point.time, point.memory) == pytest.approx((solution.time, solution.memory))
        assert problem.fits(solution.memory)


@settings(max_examples=200, deadline=None)
@given(problems())
def test_any_graph_is_solved_as_if_everything_was_tried(problem):
    check(problem)


@settings(max_examples=40, deadline=None)
@given(layered())
def test_equal_layers_are_solved_as_if_everything_was_tried(problem):
    check(problem)


@settings(max_examples=100, deadline=None)
@given(problems())
def test_the_quick_bound_is_a_bound(problem):
    times = everything(problem)[1]

    assert relax(problem) <= times.min(initial=math.inf) + 1e-8


def long_problem(part: float = 0.3) -> Problem:
    """30 layers whose points mix, with a limit between the least memory and that of the fastest."""
    problem = repeat(np.random.default_rng(5), 30, 4, 4, PHASES[1])
    free = solve(problem)
    return at_most(problem, free.least_memory + part * (free.memory - free.least_memory))


def test_the_gap_is_within_the_aim():
    solution = solve(long_problem(), aim=0.01)

    assert 0 <= solution.gap <= 0.01
    assert solution.bound <= solve(long_problem(), aim=0.0).time


def test_told_to_stop_it_gives_the_best_so_far_that_fits():
    problem = long_problem()

    solution = solve(problem, aim=0.0, stop=lambda: True)

    assert solution.stopped and not solution.exact
    assert solution.states is not None and problem.fits(solution.memory)
    assert solution.time == pytest.approx(problem.point(np.array(solution.states)).time)
    assert solution.bound < solution.time


def test_told_to_stop_in_the_middle_it_still_gives_a_bound():
    polls = []
    solution = solve(long_problem(), aim=0.0, stop=lambda: polls.append(True) or len(polls) > 8)

    assert solution.stopped
    assert 0 < solution.bound <= solution.time < math.inf


def test_it_ends_when_the_bound_exceeds_what_is_known_already():
    problem = long_problem()
    full = solve(problem, aim=0.0)
    steps = []

    solution = solve(problem, aim=0.0, upper=full.bound * 0.9, progress=lambda time, bound: steps.append(bound))

    assert full.bound * 0.9 < solution.bound <= full.bound
    assert not solution.stopped


def test_progress_hears_of_better_times_and_better_bounds():
    heard = []

    solution = solve(long_problem(), aim=0.0, progress=lambda time, bound: heard.append((time, bound)))

    times, bounds = zip(*heard, strict=True)
    assert len(heard) > 3
    assert sorted(times, reverse=True) == list(times) and sorted(bounds) == list(bounds)
    assert times[-1] == solution.time


def test_nothing_fits_and_the_least_memory_says_what_is_missing():
    problem = repeat(np.random.default_rng(0), 10, 3, 3)
    least = solve(problem).least_memory

    solution = solve(at_most(problem, least - 1))

    assert solution.states is None and solution.exact
    assert solution.least_memory == pytest.approx(least)


def test_a_limit_that_only_the_leanest_meets_is_met():
    problem = repeat(np.random.default_rng(1), 10, 3, 3)
    least = solve(problem).least_memory

    solution = solve(at_most(problem, least))

    assert solution.memory == pytest.approx(least)


def test_everything_is_forbidden():
    table = np.full((2, 3), [np.inf, 0.0, 0.0])
    problem = Problem((2,), (CostFactor((0,), table),), (0,), PHASES[0], MEMORY)

    solution = solve(problem)

    assert solution.states is None and solution.least_memory == math.inf


def test_layers_mix_two_ways_to_be_run():
    """40 layers, each fast and large or slow and lean, joined by nothing: as many as fit are fast."""
    table = np.array([[1.0, 0.0, 10.0], [3.0, 0.0, 2.0]])
    factors = tuple(CostFactor((v,), table) for v in range(40))
    problem = Problem((2,) * 40, factors, tuple(range(40)), PHASES[0], MEMORY, 8.0 * 17 + 2 * 40 + 5)

    solution = solve(problem, aim=0.0)

    assert solution.states is not None and solution.states.count(0) == 17
    assert solution.exact, "17 are fast whichever they are; the fronts of equal layers are short"


def test_a_chain_changes_over_where_mixing_needs_it():
    """60 layers in two ways that are dear to change between: what fits is a run of one and then a run of the other."""
    change = np.array([[[0.0] * 3, [2.0, 0.0, 0.0]], [[2.0, 0.0, 0.0], [0.0] * 3]])
    way = np.array([[1.0, 0.0, 10.0], [3.0, 0.0, 2.0]])
    factors = [CostFactor((v,), way) for v in range(60)] + [CostFactor((v, v + 1), change) for v in range(59)]
    problem = Problem((2,) * 60, tuple(factors), tuple(range(60)), PHASES[0], MEMORY, 8.0 * 25 + 2 * 60)

    solution = solve(problem, aim=0.0)

    assert solution.states is not None and solution.states.count(0) == 25
    assert solution.time == 25 * 1 + 35 * 3 + 2
    assert solution.exact


def test_without_the_integer_programme_a_wide_graph_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "highspy", None)

    with pytest.raises(PlanError, match=r"too wide.*cells.*highspy.*shardwright\[ilp\]"):
        solve(wide_problem(12, 8))


def test_a_wide_graph_goes_to_the_integer_programme(monkeypatch):
    problem = wide_problem(7, 3)
    truth = best_time(problem)
    monkeypatch.setattr(elimination, "MOST_CELLS", 3**4)

    solution = solve(problem, aim=0.0)

    assert solution.time == pytest.approx(truth)
    assert relax(problem) <= truth

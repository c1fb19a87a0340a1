"""A problem adds up what its factors cost, and refuses tables that do not fit it."""

from __future__ import annotations

import numpy as np
import pytest

from shardwright.errors import PlanError
from shardwright.plan.search import CostFactor, Problem, Solution

MEMORY = np.array([0.0, 1.0])
TIME = ((np.array([1.0, 0.0]),),)


def problem_of(*factors: CostFactor, sizes=(2, 3), blocks=(0, 0), phases=TIME) -> Problem:
    return Problem(sizes, factors, blocks, phases, MEMORY)


def test_resources_are_the_sum_of_the_factors():
    single, both = np.arange(4.0).reshape(2, 2), np.arange(12.0).reshape(3, 2, 2)
    problem = problem_of(CostFactor((0,), single), CostFactor((1, 0), both))

    point = problem.point(np.array([1, 2]))

    assert point.resources.tolist() == [2 + 10, 3 + 11]
    assert (point.time, point.memory) == (12, 14)


def test_time_is_a_sum_over_phases_of_the_slowest_form():
    phases = ((np.array([1.0, 0.0]), np.array([0.0, 1.0])), (np.array([0.0, 2.0]),))
    problem = problem_of(CostFactor((0,), np.ones((2, 2))), phases=phases)

    assert problem.time(np.array([5.0, 3.0])) == max(5, 3) + 2 * 3


def test_factors_of_one_table_are_one_group():
    table = np.ones((2, 2))
    problem = problem_of(CostFactor((0,), table), CostFactor((1,), table), CostFactor((1,), table.copy()), sizes=(2, 2))

    assert [group.rows.tolist() for group in problem.groups] == [[[0], [1]], [[1]]]


@pytest.mark.parametrize(
    ("factor", "fault"),
    [
        (CostFactor((0,), np.ones((3, 2))), "other sizes"),
        (CostFactor((0, 0), np.ones((2, 2, 2))), "twice"),
        (CostFactor((2,), np.ones((2, 2))), "beyond the 2"),
        (CostFactor((0,), np.ones((2, 3))), "2 resources"),
        (CostFactor((), np.ones(2)), "from 1 to 4"),
        (CostFactor((0,), np.full((2, 2), np.inf)), "another resource"),
        (CostFactor((0,), np.full((2, 2), np.nan)), "nan"),
    ],
)
def test_a_factor_that_does_not_fit_is_refused(factor, fault):
    with pytest.raises(PlanError, match=fault):
        problem_of(factor)


def test_a_problem_without_phases_is_refused():
    with pytest.raises(PlanError, match="needs a phase"):
        problem_of(CostFactor((0,), np.ones((2, 2))), phases=())


@pytest.mark.parametrize(("time", "bound", "gap"), [(11.0, 10.0, 0.1), (10.0, 10.0, 0.0), (1.0, 0.0, np.inf)])
def test_the_gap_is_a_part_of_the_bound(time, bound, gap):
    assert Solution((0,), MEMORY, time, 0.0, bound, False, 0.0, False).gap == pytest.approx(gap)

"""Elimination finds the least weighted sum, and does equal steps once."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.search import CostFactor, Problem
from shardwright.plan.search import elimination as module
from shardwright.plan.search.elimination import TooWide, eliminate
from tests.plan.search.drawn import MEMORY, ONE_FORM, everything, layered, problems, repeat, table, wide_problem

WEIGHTS = np.array([1.0, 0.5, 0.0])  # the one form of ONE_FORM, so that time is what is minimised


def check(problem: Problem) -> None:
    least = everything(problem)[1].min(initial=np.inf)

    run = eliminate(problem).run(WEIGHTS)

    assert run.value == pytest.approx(least)
    if np.isfinite(least):
        assert problem.point(run.walk()).time == pytest.approx(least)


@settings(max_examples=200, deadline=None)
@given(problems(phases=ONE_FORM))
def test_any_graph_gives_what_trying_everything_gives(problem):
    check(problem)


@settings(max_examples=50, deadline=None)
@given(layered(phases=ONE_FORM))
def test_equal_layers_give_what_trying_everything_gives(problem):
    check(problem)


@settings(max_examples=50, deadline=None)
@given(problems(phases=ONE_FORM, most=5), st.integers(1, 8))
def test_tables_are_looked_at_in_chunks(problem, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        patch.setattr(module, "FEW_CELLS", 0)
        check(problem)


def plain_chain(problem: Problem, layers: int, width: int, states: int) -> float:
    """The dynamic programme over layers: all states of a layer against all of the one before."""
    own = [f for f in problem.factors if max(f.variables) < width]
    joined = [f for f in problem.factors if min(f.variables) < width <= max(f.variables)]
    grids = np.indices((states,) * (2 * width)).reshape(2 * width, -1)
    between = sum((f.table @ WEIGHTS)[tuple(grids[v] for v in f.variables)] for f in joined)
    inside = sum((f.table @ WEIGHTS)[tuple(grids[width + v] for v in f.variables)] for f in own)
    step = (between + inside).reshape(states**width, states**width)
    best = inside.reshape(states**width, states**width)[0]
    for _ in range(layers - 1):
        best = (best[:, None] + step).min(axis=0)
    return float(best.min())


@pytest.mark.parametrize("states", [2, 4])
def test_a_chain_of_200_layers_is_the_plain_dynamic_programme(states):
    problem = repeat(np.random.default_rng(states), 200, 3, states)
    problem_of_two = Problem(
        problem.sizes[:6],
        tuple(f for f in problem.factors if max(f.variables) < 6),
        problem.blocks[:6],
        ONE_FORM,
        MEMORY,
    )

    run = eliminate(problem).run(WEIGHTS)

    assert run.value == pytest.approx(plain_chain(problem_of_two, 200, 3, states))
    assert problem.point(run.walk()).time == pytest.approx(run.value)


@pytest.mark.parametrize("hub", [False, True])
def test_equal_layers_are_done_once(hub):
    few = eliminate(repeat(np.random.default_rng(0), 64, 5, 3, hub=hub))
    many = eliminate(repeat(np.random.default_rng(0), 1024, 5, 3, hub=hub))

    assert len(many.steps) - len(few.steps) <= 4 * 4, "16 times the layers: 4 more levels, and their ends"
    assert sum(len(rows) for rows in many.rows) == many.variables


def test_a_variable_without_factors_has_its_first_state():
    problem = Problem((2, 5), (CostFactor((0,), table(np.random.default_rng(0), 2)),), (0, 0), ONE_FORM, MEMORY)

    assert eliminate(problem).run(WEIGHTS).walk()[1] == 0


def test_tables_that_would_be_too_large_are_refused_before_they_are_made():
    with pytest.raises(TooWide, match="cells"):
        eliminate(wide_problem(12, 8))


def test_borders_that_are_too_wide_for_products_are_eaten_from_the_ends(monkeypatch):
    problem = repeat(np.random.default_rng(0), 6, 2, 4)
    joined = table(np.random.default_rng(1), 4, 4)
    crossed = tuple(CostFactor((v, v + 2), joined) for v in range(10))
    problem = Problem(problem.sizes, problem.factors + crossed, problem.blocks, ONE_FORM, MEMORY)
    value = eliminate(problem).run(WEIGHTS).value
    monkeypatch.setattr(module, "MOST_CELLS", 4**3)
    same = Problem(problem.sizes, problem.factors, problem.blocks, ONE_FORM, MEMORY)

    assert eliminate(same).run(WEIGHTS).value == pytest.approx(value)
    assert max(max(step.shape[1:], default=0) for step in eliminate(same).steps) == 4


def test_another_limit_changes_nothing_of_the_steps():
    problem = repeat(np.random.default_rng(0), 3, 2, 3)
    short = problem.within(5.0)

    assert short.limit == 5.0 and problem.limit == math.inf
    assert eliminate(short) is eliminate(problem) is eliminate(short.within(7.0))
    assert eliminate(dataclasses.replace(short, factors=problem.factors)) is not eliminate(problem)


@pytest.mark.parametrize("states", [2, 3, 5])
def test_an_order_serves_tables_of_other_sizes(states):
    first, other = (repeat(np.random.default_rng(size), 4, 3, size) for size in (3, states))
    like = dataclasses.replace(other, like=first)
    own = eliminate(other).run(WEIGHTS)
    steps = eliminate(first).steps

    elimination = eliminate(like)

    assert len(elimination.steps) == len(steps)
    assert elimination.run(WEIGHTS).value == pytest.approx(own.value)
    assert like.point(elimination.run(WEIGHTS).walk()).time == pytest.approx(own.value)


def test_an_order_that_is_much_worse_is_not_taken(monkeypatch):
    first, other = (repeat(np.random.default_rng(size), 4, 3, size) for size in (2, 5))
    eliminate(first)
    monkeypatch.setattr(module, "LITTLE_WORK", 0)
    monkeypatch.setattr(module, "MUCH_MORE", 0)

    elimination = eliminate(dataclasses.replace(other, like=first))

    assert elimination.work == eliminate(other).work

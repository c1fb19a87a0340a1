"""A narrow problem has the points it was made of, at their cost, and keeps equal layers equal."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.plan.search.narrow import narrow
from tests.plan.search.drawn import everything, layered, repeat


@settings(max_examples=40, deadline=None)
@given(layered(forbid=0.0), st.data())
def test_its_points_cost_what_they_cost_in_the_whole(problem, data):
    states = everything(problem)[0]
    assume(len(states))
    points = [problem.point(states[data.draw(st.integers(0, len(states) - 1))]) for _ in range(3)]

    small = narrow(problem, points)

    assert max(small.problem.sizes) <= 3
    chosen = np.array([data.draw(st.integers(0, size - 1)) for size in small.problem.sizes])
    inside, outside = small.problem.point(chosen), problem.point(small.widen(chosen))
    assert inside.resources == pytest.approx(outside.resources)


def test_equal_layers_that_are_mixed_alike_share_their_tables():
    problem = repeat(np.random.default_rng(0), 50, 3, 3)
    ones, twos = (problem.point(np.full(150, state)) for state in (1, 2))

    small = narrow(problem, [ones, twos])

    assert len(small.problem.groups) == len(problem.groups)
    assert small.widen(np.zeros(150, dtype=np.intp)).tolist() == [1] * 150

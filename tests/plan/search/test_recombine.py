"""Mixing two points changes what their switches say, and never leaves the limit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from shardwright.plan.search.recombine import blend, compare, recombine
from tests.plan.search.drawn import everything, layered

WEIGHTS = np.array([1.0, 0.5, 0.0])


def two_points(problem, data):
    states = everything(problem)[0]
    assume(len(states))
    chosen = [data.draw(st.integers(0, len(states) - 1)) for _ in range(2)]
    return [problem.point(states[i]) for i in chosen]


@settings(max_examples=40, deadline=None)
@given(layered(), st.data())
def test_every_set_of_switches_adds_up(problem, data):
    base, second = two_points(problem, data)
    switches = compare(problem, base, second)
    on = np.array([data.draw(st.booleans()) for _ in switches.changes], dtype=bool)

    mixed = problem.point(switches.flip(on))

    assert mixed.resources == pytest.approx(base.resources + switches.changes[on].sum(axis=0))
    assert np.isfinite(mixed.resources).all(), "what neither point forbids no mix of theirs forbids"


@settings(max_examples=40, deadline=None)
@given(layered(), st.data())
def test_a_mix_fits_and_is_no_slower_than_its_points(problem, data):
    first, second = two_points(problem, data)
    fitting = [point.time for point in (first, second) if problem.fits(point.memory)]

    mixed = recombine(problem, first, second, WEIGHTS)

    if mixed is not None:
        assert problem.fits(mixed.memory)
        assert mixed.time <= min(fitting, default=np.inf) + 1e-9
    elif fitting:
        assert (first.states == second.states).all()


@settings(max_examples=20, deadline=None)
@given(layered(), st.data())
def test_a_blend_goes_from_one_point_to_the_other(problem, data):
    first, second = two_points(problem, data)

    assert (blend(problem, first, second, 0.0).states == first.states).all()
    assert (blend(problem, first, second, 1.0).states == second.states).all()

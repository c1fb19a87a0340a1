"""The tiny linear programmes are solved, checked by what a solution must satisfy."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.plan.search.simplex import maximise


def best_vertex(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """The best of all corners: every choice of as many binding constraints as there are unknowns."""
    rows, right = np.concatenate([a, -np.eye(len(c))]), np.concatenate([b, np.zeros(len(c))])
    best = -np.inf
    for chosen in combinations(range(len(rows)), len(c)):
        some = rows[list(chosen)]
        if abs(np.linalg.det(some)) > 1e-9:
            y = np.linalg.solve(some, right[list(chosen)])
            if (rows @ y <= right + 1e-9).all():
                best = max(best, float(c @ y))
    return best


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_the_best_corner_is_found(seed):
    random = np.random.default_rng(seed)
    unknowns = int(random.integers(1, 4))
    a = random.integers(-3, 4, (int(random.integers(1, 6)), unknowns)).astype(float)
    a = np.concatenate([a, np.ones((1, unknowns))])  # so that nothing grows without bound
    b = np.append(random.integers(0, 5, len(a) - 1), 9.0)
    c = random.integers(-3, 4, unknowns).astype(float)

    y = maximise(c, a, b)

    assert y is not None
    assert (y >= 0).all() and (a @ y <= b + 1e-9).all()
    assert c @ y == pytest.approx(best_vertex(c, a, b))


def test_what_can_grow_without_bound_has_no_best():
    assert maximise(np.array([1.0]), np.array([[-1.0]]), np.array([1.0])) is None

"""The same problem with only the states that some points have, so that it can mix them in every way.

Where two points differ along a whole chain of layers there is one component and nothing to recombine; but the chain may
go one way up to some layer and the other way from there on. The narrow problem has two or three states for each
variable, so its fronts (pareto.py) find the cheapest places to change over. Layers that are equal stay equal.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .problem import CostFactor, Ints, Point, Problem


@dataclass(frozen=True, eq=False)
class Narrow:
    problem: Problem
    states: list[Ints]  # for each variable the states that are left

    def widen(self, states: Ints) -> Ints:
        """The states of the whole problem."""
        return np.array([left[state] for left, state in zip(self.states, states, strict=True)], dtype=np.intp)


def narrow(problem: Problem, points: Sequence[Point]) -> Narrow:
    """The problem of mixing these points."""
    used_states = [np.unique(column) for column in np.array([point.states for point in points]).T]
    numbers: dict[bytes, int] = {}
    kind = np.array([numbers.setdefault(left.tobytes(), len(numbers)) for left in used_states], dtype=np.intp)
    factors = []
    for group in problem.groups:
        _, first, same = np.unique(kind[group.rows], axis=0, return_index=True, return_inverse=True)
        tables = [group.table[np.ix_(*(used_states[v] for v in group.rows[at]))] for at in first]
        rows = zip(group.rows.tolist(), same.reshape(-1).tolist(), strict=True)
        factors += [CostFactor(tuple(row), tables[number]) for row, number in rows]
    sizes = tuple(len(left) for left in used_states)
    blocks, phases = problem.blocks, problem.phases
    return Narrow(Problem(sizes, tuple(factors), blocks, phases, problem.memory, problem.limit), used_states)

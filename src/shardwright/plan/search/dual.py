"""The best bound that weights can give: the Lagrangean dual, by cutting planes.

A max is the best of all weighted means of its forms, and a limit can be paid for, so for any weights mu (summing to 1
in each phase) and any price lambda >= 0

    L(mu, lambda) = min over x of  sum over phases p, forms f of mu_pf w_pf . r(x)  +  lambda (memory . r(x) - limit)

is at most the time of every x within the limit. L is concave, and each minimiser r gives a plane above it:

    L(y) <= a(r) + g(r) . y        y = (mu without each phase's first form, lambda)          Multipliers.cut

`Dual.steps` walks: solve at some y, add the plane, let the planes say where L may be largest (`Dual.highest`, a tiny
linear programme), then halfway between there and the best y so far. a(r) is at least L(0), which is solved before the
planes are asked, so the linear programme has an easy start. So is the least memory: its plane keeps lambda finite.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from .elimination import Elimination
from .problem import ROUNDING, Floats, Point, Problem
from .simplex import maximise

MOST_STEPS = 200


@dataclass(frozen=True, eq=False)
class Multipliers:
    """The coordinates y of a problem: one for each form but the first of its phase, then lambda if there is a limit."""

    problem: Problem
    first: Floats  # the sum of the first forms of all phases
    moves: Floats  # for each coordinate what it adds to the weights: [coordinate, K]
    phases: tuple[tuple[int, ...], ...]  # coordinates that together are at most 1
    limited: bool

    def weights(self, y: Floats) -> Floats:
        """The linear objective at y, but for its constant."""
        return self.first + y @ self.moves

    def of_time(self, y: Floats) -> Floats:
        """The part of the weights that stands for time."""
        return self.weights(y) - (y[-1] * self.problem.memory if self.limited else 0.0)

    def constant(self, y: Floats) -> float:
        return -float(y[-1]) * self.problem.limit if self.limited else 0.0

    def cut(self, point: Point) -> Floats:
        """The plane of a point: a(r), then g(r)."""
        slopes = self.moves @ point.resources
        if self.limited:
            slopes[-1] -= self.problem.limit
        return np.concatenate([[self.first @ point.resources], slopes])


def multipliers(problem: Problem, limited: bool) -> Multipliers:
    moves: list[Floats] = []
    phases = []
    for forms in problem.phases:
        phases.append(tuple(range(len(moves), len(moves) + len(forms) - 1)))
        moves += [form - forms[0] for form in forms[1:]]
    if limited:
        moves.append(problem.memory)
    first = np.sum([forms[0] for forms in problem.phases], axis=0)
    stacked = np.array(moves) if moves else np.zeros((0, len(problem.memory)))
    return Multipliers(problem, first, stacked, tuple(p for p in phases if p), limited)


@dataclass(eq=False)
class Dual:
    """The state of the search for the best y: the points that were met, their planes, the best bound."""

    problem: Problem
    elimination: Elimination
    limited: bool  # whether the memory limit counts
    hint: Floats | None = None  # multipliers that were good for a problem like this one
    points: list[Point] = field(default_factory=list)
    bound: float = -math.inf
    ceiling: float = math.inf  # no y gives more than this
    least_memory: float = -math.inf

    def __post_init__(self) -> None:
        self.space = multipliers(self.problem, self.limited)
        self.cuts: list[Floats] = []
        self.best = np.zeros(len(self.space.moves))

    def steps(self) -> Iterator[Point]:
        """Solve at better and better y, giving each point; ends when the bound can't get better."""
        origin = np.zeros(len(self.space.moves))
        if not self.elimination.possible:
            self.bound = self.least_memory = math.inf
            return
        if self.hint is not None and len(self.hint) == len(origin):
            yield self.solve(self.hint)  # first of all, since its bound may be all that is asked for
        yield self.solve(origin)
        if self.limited:
            self.least_memory, states = self.elimination.least(self.problem.memory)
            yield self._meet(self.problem.point(states))
            if not self.problem.fits(self.least_memory):
                self.bound = math.inf
                return
        for y in self._middles(origin):
            yield self.solve(y)
        share = 0.5
        self.ceiling, y = self.highest()
        for _ in range(MOST_STEPS):
            if self.closed:
                return
            high, wide = self.ceiling, self.ceiling - self.bound
            yield self.solve(self.best + share * (y - self.best))
            self.ceiling, y = self.highest()
            fell = high - self.ceiling > 0.3 * wide
            share = 0.5 if fell else 1.0  # halfway is calmer, all the way is sure to cut, or to meet the ceiling

    def fits(self) -> bool:
        """Whether anything is within the limit; if not, no y is better than the one that was handed in."""
        least, _ = self.elimination.least(self.problem.memory)
        if self.problem.fits(least):
            return True
        self.bound, self.least_memory = math.inf, least
        self.best = self.hint if self.hint is not None and len(self.hint) == len(self.best) else self.best
        return False

    @property
    def closed(self) -> bool:
        return self.ceiling - self.bound <= ROUNDING * max(abs(self.ceiling), abs(self.bound))

    def solve(self, y: Floats) -> Point:
        """The least at y."""
        least, states = self.elimination.least(self.space.weights(y))
        value = least + self.space.constant(y)
        if value > self.bound:
            self.bound, self.best = value, y
        return self._meet(self.problem.point(states))

    def _meet(self, point: Point) -> Point:
        self.points.append(point)
        self.cuts.append(self.space.cut(point))
        return point

    def _middles(self, origin: Floats) -> list[Floats]:
        """Equal weights for all forms, where there is a choice."""
        if not self.space.phases:
            return []
        y = origin.copy()
        for phase in self.space.phases:
            y[list(phase)] = 1 / (len(phase) + 1)
        return [y]

    def highest(self) -> tuple[float, Floats]:
        """Where the planes are highest, and how high: max t, t <= a + g . y for all planes."""
        cuts = np.unique(np.array(self.cuts), axis=0)
        floor = float(cuts[:, 0].min())  # y = 0 gives at least this
        unit = max(abs(floor), float(np.ptp(cuts[:, 0]))) or 1.0
        size = np.abs(cuts[:, 1:]).max(axis=0) / unit  # so that all numbers are about 1
        size[size == 0] = 1.0
        dims = len(size)
        rows = np.concatenate([np.ones((len(cuts), 1)), -cuts[:, 1:] / unit / size], axis=1)
        right = (cuts[:, 0] - floor) / unit
        for phase in self.space.phases:
            row = np.zeros((1, dims + 1))
            row[0, [1 + each for each in phase]] = 1 / size[list(phase)]
            rows, right = np.concatenate([rows, row]), np.append(right, 1.0)
        if self.limited:  # a price that no point asks for: the limit is the least memory itself
            row = np.zeros((1, dims + 1))
            row[0, -1] = 1.0
            rows, right = np.concatenate([rows, row]), np.append(right, 1e6)
        solution = maximise(np.eye(dims + 1)[0], rows, right)
        assert solution is not None, "every coordinate has a row that binds it"
        return floor + unit * float(solution[0]), solution[1:] / size

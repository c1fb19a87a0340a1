"""All that is at most so much slower than the bound, exactly: fronts of linear forms, cell by cell.

The same steps as the elimination's, but a cell holds every vector of (forms of time, memory) that is not dominated
by another of the cell, since which of them is best shows only in the end (time has a max in it, memory a limit).

What keeps fronts short is the bound. Let M be the tables of the elimination at the best weights. Through a cell c of
a table no point is better, by these weights, than bound + detour[c] (`_detours`, from the last step backwards); and a
vector v of the cell lies another

    excess(v) = weights . v - M[c]  >=  0

above that. By these weights a point within the limit is never slower than its time. So what has detour + excess > gap
belongs to no point with a time up to bound + gap, and goes (`Fronts.expand`). Excesses of a step's inputs add up.
Where the gap is small, little is left of the largest problem; where it is not, `TooMany` says so.

Vectors are rounded to a grid so fine that it does not matter and so coarse that their sums are exact: equal layers
in another order give equal vectors, and equal vectors are one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError
from .dual import Dual
from .elimination import Elimination, EliminationStep, add
from .problem import ROUNDING, Floats, Ints, Point, Problem

MOST_CELLS = 2**23  # of a step
MOST_ROWS = 2**20  # vectors looked at in all
MOST_COMPARED = 2**26  # pairs of vectors in all
BLOCK = 64  # vectors of a cell up to which all pairs are compared one distance after the other
EXACT_BITS = 48  # of a sum, so that sums of grid points are exact


class TooMany(PlanError):
    """The fronts would be too long."""


class Stopped(PlanError):
    """The search was asked to stop."""


@dataclass(frozen=True, eq=False)
class ParetoFront:
    """The vectors of a table's cells, those of one cell next to each other."""

    start: Ints  # for each cell its first vector; one more at the end
    values: Floats  # [vector, form]
    excess: Floats
    state: Ints  # of the variable that was eliminated
    origin: Ints  # the vector of each input that this one is made of: [vector, input]


class _Forms:
    """The linear forms that decide: one for all phases of a single form, each form of the others, memory."""

    def __init__(self, problem: Problem, limited: bool) -> None:
        single = [forms[0] for forms in problem.phases if len(forms) == 1]
        rows = [np.sum(single, axis=0)] if single else []
        self.phases = [slice(0, 1)] if single else []
        for forms in problem.phases:
            if len(forms) > 1:
                self.phases.append(slice(len(rows), len(rows) + len(forms)))
                rows += list(forms)
        if limited:
            rows.append(problem.memory)
        self.rows = np.array(rows)

    def times(self, values: Floats) -> Floats:
        total: Floats = np.sum([values[:, phase].max(axis=1) for phase in self.phases], axis=0)
        return total


class ParetoSearch:
    """The search for a problem at the best weights of its dual, for one gap after the other."""

    def __init__(self, dual: Dual) -> None:
        self.problem, self.limited = dual.problem, dual.limited
        self.elimination: Elimination = dual.elimination
        if (most := max(math.prod(step.shape) for step in self.elimination.steps)) > MOST_CELLS:
            raise TooMany(f"a step of the exact search has {most:,} cells, more than {MOST_CELLS:,}")
        self.tables = self.elimination.run(dual.space.weights(dual.best)).tables
        self.detours = _detours(self.elimination, self.tables)
        self.rounding = ROUNDING * abs(dual.bound)
        self.forms = _Forms(dual.problem, dual.limited)
        self.leaves = self._leaves()

    def search(
        self, gap: float, stop: Callable[[], bool], thin: int | None = None, effort: float = 1.0
    ) -> Point | None:
        """The best point with a time up to bound + gap, if there is one; maybe one that is slower.

        With `thin`, no cell keeps more vectors than that, and what is found need not be the best. TooMany if it is
        more than `effort` of what is looked at otherwise, Stopped if it is asked to.
        """
        self.thin = thin
        self.most_rows, self.most_compared = int(effort * MOST_ROWS), int(effort * MOST_COMPARED)
        self.gap = gap + self.rounding
        self.rows = self.compared = 0
        self.fronts = list(self.leaves)
        for step in self.elimination.steps:
            if stop():
                raise Stopped
            self.expand(step)
        return self._best_point()

    def _leaves(self) -> list[ParetoFront]:
        """One vector for each cell, rounded to the grid; forbidden cells are never asked for."""
        values = self.elimination.leaves @ self.forms.rows.T
        groups = self.elimination.groups
        lengths = [math.prod(group.table.shape[:-1]) for group in groups]
        parts = np.split(values, np.cumsum(lengths)[:-1])
        most = sum(len(group.rows) * np.abs(part).max(axis=0) for group, part in zip(groups, parts, strict=True))
        grid = 2.0 ** (np.ceil(np.log2(np.maximum(most, 1e-300))) - EXACT_BITS)
        none = np.zeros(0, dtype=np.intp)
        return [  # their detours are not asked for: a step looks at its own first
            ParetoFront(np.arange(n + 1), np.round(part / grid) * grid, np.zeros(n), none, none)
            for n, part in zip(lengths, parts, strict=True)
        ]

    def expand(self, step: EliminationStep) -> None:
        """The front of the next step."""
        tables, node = self.tables, len(self.fronts)
        above = _above(step, tables, tables[node])
        cells = np.nonzero(above + self.detours[node] <= self.gap)
        which, excess = np.arange(len(cells[0])), above[cells]
        allowed = self.gap - np.broadcast_to(self.detours[node], step.shape)[cells]
        values = np.zeros((len(which), len(self.forms.rows)))
        origins: list[Ints] = []
        for operand in step.inputs:
            front = self.fronts[operand.node]
            shape = tables[operand.node].shape
            cell = np.ravel_multi_index([cells[place] for place in operand.places], shape)[which]
            again, vector = self._join(front, np.asarray(cell))
            total = excess[again] + front.excess[vector]
            keep = total <= allowed[which[again]]
            again, vector = again[keep], vector[keep]
            which, excess = which[again], total[keep]
            values = values[again] + front.values[vector]
            origins = [*(origin[again] for origin in origins), vector]
        rest = cells[1:]
        out = np.ravel_multi_index(rest, step.shape[1:])[which] if rest else np.zeros(len(which), dtype=np.intp)
        best = self._keep(np.asarray(out), values)
        start = np.searchsorted(out[best], np.arange(tables[node].size + 1))
        origin = np.stack([each[best] for each in origins], axis=1)
        self.fronts.append(ParetoFront(start, values[best], excess[best], cells[0][which[best]], origin))

    def _join(self, front: ParetoFront, cell: Ints) -> tuple[Ints, Ints]:
        """Pair each row with every vector of its cell: the rows' numbers, and the vectors'."""
        counts = front.start[cell + 1] - front.start[cell]
        self.rows += int(counts.sum())
        if self.rows > self.most_rows:
            raise TooMany(f"the exact search would look at more than {self.most_rows:,} vectors")
        again = np.repeat(np.arange(len(cell)), counts)
        within = np.arange(len(again)) - np.repeat(np.cumsum(counts) - counts, counts)
        return again, front.start[cell][again] + within

    def _keep(self, group: Ints, values: Floats) -> Ints:
        best, compared = nondominated(group, values, self.most_compared - self.compared)
        self.compared += compared
        return best if self.thin is None else best[spread(group[best], self.thin)]

    def _best_point(self) -> Point | None:
        """The best vector of all parts together that fits, as states."""
        values, excess = np.zeros((1, len(self.forms.rows))), np.zeros(1)
        trail: list[tuple[int, int, Ints, Ints]] = []  # table, which of its places, vector so far, vector of the part
        for node, count in self.elimination.roots:
            front = self.fronts[node]
            for place in range(count):
                before, vector = self._join(front, np.zeros(len(values), dtype=np.intp))
                total = excess[before] + front.excess[vector]
                keep = total <= self.gap
                values = values[before[keep]] + front.values[vector[keep]]
                best = self._keep(np.zeros(len(values), dtype=np.intp), values)
                values, excess = values[best], total[keep][best]
                trail.append((node, place, before[keep][best], vector[keep][best]))
        fits = self.problem.fits(values[:, -1]) if self.limited else np.ones(len(values), dtype=bool)
        if not fits.any():
            return None
        chosen = int(np.where(fits, self.forms.times(values), np.inf).argmin())
        ends = []
        for node, place, before, vector in reversed(trail):
            ends.append((node, place, int(vector[chosen])))
            chosen = int(before[chosen])
        return self.problem.point(self._walk(ends))

    def _walk(self, ends: list[tuple[int, int, int]]) -> Ints:
        """The states of all variables, from the vectors of the tables without variables."""
        leaves = len(self.elimination.groups)
        free: dict[tuple[int, tuple[int, ...]], list[int]] = defaultdict(list)
        for node, rows in enumerate(self.elimination.rows, start=leaves):
            for v, *rest in rows.tolist():
                free[node, tuple(rest)].append(v)
        states = np.zeros(self.elimination.variables, dtype=np.intp)
        todo: list[tuple[int, tuple[int, ...], int]] = [(node, (), vector) for node, _, vector in ends]
        while todo:
            node, rest, vector = todo.pop()
            if node < leaves:
                continue
            names = (free[node, rest].pop(), *rest)  # equal parts on equal borders may change places
            front = self.fronts[node]
            states[names[0]] = front.state[vector]
            for operand, origin in zip(self.elimination.steps[node - leaves].inputs, front.origin[vector], strict=True):
                todo.append((operand.node, tuple(names[place] for place in operand.places), int(origin)))
        return states


def _above(step: EliminationStep, tables: list[Floats], lowest: Floats) -> Floats:
    """How much each state of the variable is above the best, in each cell; infinite where it is forbidden."""
    full = add([operand.view(tables) for operand in step.inputs])
    return np.where(np.isfinite(full), full - np.where(np.isfinite(lowest), lowest, 0.0), np.inf)


def _detours(elimination: Elimination, tables: list[Floats]) -> list[Floats]:
    """For each cell of each table how much worse than the best everything through it is, wherever the table stands."""
    detours = [np.full(table.shape, np.inf) for table in tables]
    for node, _ in elimination.roots:
        detours[node] = np.zeros(())
    leaves = len(elimination.groups)
    for node in range(len(tables) - 1, leaves - 1, -1):
        step = elimination.steps[node - leaves]
        through = _above(step, tables, tables[node]) + detours[node]
        for operand in step.inputs:
            others = tuple(axis for axis in range(through.ndim) if axis not in operand.places)
            least = through.min(axis=others)  # its axes in the step's order
            own = np.minimum(detours[operand.node], least.transpose(np.argsort(operand.axes)))
            detours[operand.node] = own
    return detours


def spread(group: Ints, most: int) -> NDArray[np.bool_]:
    """Which rows to keep so that no group has more than `most`: evenly from its first to its last."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(first, append=len(group))
    place, size = np.arange(len(group)) - np.repeat(first, sizes), np.repeat(sizes, sizes)
    slot = place * (most - 1) // np.maximum(size - 1, 1)
    return np.asarray((size <= most) | (place == 0) | (slot != np.roll(slot, 1)))


def nondominated(group: Ints, values: Floats, most: float = math.inf) -> tuple[Ints, int]:
    """The rows that no other row of their group is as good as in everything, sorted by group; equal rows once.

    Also how many pairs were compared; TooMany if more than `most` would be. Sorted by the first form, a row can only
    be beaten by one before it.
    """
    order = np.lexsort((*values.T[::-1], group))
    first = np.flatnonzero(np.diff(group[order], prepend=-1))
    sizes = np.diff(first, append=len(order))
    place = np.arange(len(order)) - np.repeat(first, sizes)
    rest = values[order][:, 1:]
    keep = ~_beaten(rest, place, min(BLOCK, int(sizes.max(initial=1))))
    compared = int(np.minimum(place, BLOCK).sum())
    for start, size in zip(first[sizes > BLOCK].tolist(), sizes[sizes > BLOCK].tolist(), strict=True):
        inside = start + np.flatnonzero(keep[start : start + size])
        length = 0
        front = np.empty((len(inside), rest.shape[1]))
        for some in np.split(inside, range(BLOCK, len(inside), BLOCK)):
            compared += (length + len(some)) * len(some)
            if compared > most:
                raise TooMany("the exact search would compare too many pairs")
            left = some[~_beaten_by(rest[some], front[:length])]
            left = left[~_beaten(rest[left], np.arange(len(left)), len(left))]
            keep[some] = False
            keep[left] = True
            front[length : length + len(left)] = rest[left]
            length += len(left)
    return order[keep], compared


def _beaten(values: Floats, place: Ints, most: int) -> NDArray[np.bool_]:
    """Which rows are no better in anything than one of the `most` rows before them in their group."""
    beaten = np.zeros(len(values), dtype=bool)
    later = np.arange(len(values))
    for distance in range(1, most):
        later = later[place[later] >= distance]
        lost = (values[later - distance] <= values[later]).all(axis=1)
        beaten[later[lost]] = True
        later = later[~lost]
    return beaten


def _beaten_by(values: Floats, front: Floats) -> NDArray[np.bool_]:
    """Which rows are no better in anything than some row of the front."""
    worse = np.ones((len(values), len(front)), dtype=bool)
    for column in range(values.shape[1]):
        worse &= front[None, :, column] <= values[:, None, column]
    return np.asarray(worse.any(axis=1))

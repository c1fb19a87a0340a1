"""What the blocks of a line use on one kind of seat, at one number of microbatches: a few ways to split and store them.

A way is a solution of the search for all ops at once, at some price of memory: the fastest one, the leanest one, and
those between which the price of memory decides. Of each it is known what every block uses, so that a stage, a run of
blocks, is a difference of two sums. Ways of different blocks can be mixed; what that loses at the seams is found when
the stages of a pipeline are solved by themselves (`refine`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...cost import is_matmul, local_call
from ...cost.resources import COUNT, Resource, memory, phases, row
from ..problem_structure import OpTable
from ..search.elimination import Elimination
from ..tables import Tables
from .blocks import BlockOfEntries, Blocks
from .bounds import LeastCosts
from .parameters import ParameterBounds
from .solver import Solver
from .timed import NEVER

WEIGHT, QUEUED = COUNT, COUNT + 1
"""Columns beside the resources: seconds of weights' gradients in backward, and bytes that wait for them."""

COLUMNS = COUNT + 2

BUSY = ("compute_forward", "compute_backward", "send_forward", "send_backward")
"""What ops and conversions take; of these parameters take little, and nobody else takes the rest."""

BETWEEN = 4
"""Steps from one price of memory at which something was solved to the next; bounds are asked at all of them."""

DEPTH = 2
"""How often the gap between two ways is halved."""


@dataclass(frozen=True, eq=False)
class StageSolution:
    """One solution for all blocks. `runs` holds the sums of all blocks before each bound: [bound, column]."""

    states: np.ndarray
    tables: Tables
    runs: np.ndarray
    shared: tuple[tuple[tuple[int, ...], np.ndarray], ...]  # parameters of several blocks: which, and what one uses

    @cached_property
    def total(self) -> np.ndarray:
        found: np.ndarray = self.runs[-1]
        return found

    def between(self, begin: int, end: int) -> np.ndarray:
        """What a run of blocks uses."""
        found: np.ndarray = self.runs[end] - self.runs[begin]
        for used, cost in self.shared:
            if used[0] < begin and any(begin <= block < end for block in used):
                found = found + cost
        return found

    @cached_property
    def picked(self) -> tuple[int, ...]:
        """The states as the tables take them."""
        return tuple(self.states.tolist())

    def table(self, width: int) -> np.ndarray:
        """[first block, blocks less one, column] for all runs of up to `width` blocks."""
        count = len(self.runs) - 1
        first = np.arange(count)[:, None]
        last = np.minimum(first + 1 + np.arange(width)[None, :], count)
        found: np.ndarray = self.runs[last] - self.runs[first]
        for used, cost in self.shared:
            held = np.zeros(count + 1)
            held[np.array(used) + 1] = 1.0
            inside = np.cumsum(held)
            again = (inside[last] > inside[first]) & (first > used[0])
            found[again] += cost
        return found


class StageFront:
    """The ways of one kind of seat at one number of microbatches."""

    def __init__(
        self,
        plain: Tables,
        again: Callable[[], Tables | None],
        where: dict[bool, BlockOfEntries],
        solver: Solver,
        times: int,
    ) -> None:
        """`again` makes the tables with layers that may be recomputed, when they are wanted."""
        self.plain, self._make_again, self.where, self.solver, self.microbatches = plain, again, where, solver, times
        self.overlap = plain.moves.cluster.overlap
        self.time = np.sum([forms[0] for forms in phases(self.overlap, times)], axis=0)
        self._busy = self.time * sum(row(**{name: 1.0}) for name in BUSY)
        self._ways: dict[float, list[StageSolution]] = {}
        self._extra: dict[int, np.ndarray] = {}
        self._eliminations: dict[int, Elimination | None] = {}
        self._cells: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    @cached_property
    def again(self) -> Tables | None:
        return self._make_again()

    @cached_property
    def fastest(self) -> StageSolution | None:
        """Whatever the memory; None if it can't be done at all."""
        found = self._solve(self.plain, self.time)
        return found if found is not None and self._time(found) < NEVER / 2 else None

    def _time(self, way: StageSolution) -> float:
        return float(self.time @ way.total[:COUNT])

    @cached_property
    def least(self) -> float:
        """Seconds of a microbatch in all blocks, at least, of ops and conversions alone."""
        if self.fastest is None:
            return math.inf
        return float(self._busy @ self.fastest.total[:COUNT]) / self.microbatches - self._added

    def ways(self, flight: float) -> list[StageSolution]:
        """The ways worth having if `flight` microbatches are kept at once, the fastest first."""
        if self.fastest is None:
            return []
        if flight not in self._ways:
            weights = memory() + (flight - 1.0) * row(kept=1.0)
            tables = self.again or self.plain
            lean = self._solve(tables, weights + 1e-9 * self.time)
            found = (
                [self.fastest] if lean is None else [self.fastest, *self._between(self.fastest, lean, weights), lean]
            )
            self._ways[flight] = _undominated(found, self.time, weights)
        return self._ways[flight]

    def tight(self, times: float, flight: float, room: float) -> LeastCosts:
        """About what a step takes at least if all blocks are on one seat, at some prices of memory.

        `times`: microbatches, with those that are waited for; `flight`: those that are kept at once. Where the fastest
        way has room enough it is all that there is.
        """
        assert self.fastest is not None
        weights = memory() + (flight - 1.0) * row(kept=1.0)

        def point(way: StageSolution) -> tuple[float, float]:
            used = way.total[:COUNT]
            once = float(used[Resource.UPDATE])
            return (float(self.time @ used) - once) * times / self.microbatches + once, float(weights @ used)

        first = point(self.fastest)
        if first[1] <= room:
            return LeastCosts(np.zeros(1), np.array(first[:1]))
        points = [point(way) for way in self.ways(flight)]
        found = [(0.0, first[0])]
        for (fast, more), (slow, less) in pairwise(points):
            if slow > fast and less < more:
                price = (slow - fast) / (more - less)
                found.append((price, slow + price * less))
        prices, least = np.array(found).T
        return LeastCosts(prices, least, points[-1][1])

    @cached_property
    def floor(self) -> LeastCosts | None:
        """What a microbatch takes at least in ops and conversions, at some prices of what it keeps.

        Unlike what is made of `ways` it is a bound: nothing is less at its price, whatever is recomputed. None if the
        graph is too wide to be solved with layers that may be.
        """
        busy, kept, tables = self._busy / self.microbatches, row(kept=1.0), self.again or self.plain
        prices: dict[float, float] = {}

        def point(way: StageSolution) -> tuple[float, float]:
            return float(busy @ way.total[:COUNT]), float(way.total[Resource.KEPT])

        def solved(price: float) -> tuple[float, float]:
            way = self._solve(tables, busy + price * kept)
            assert way is not None, "what can be done at one price can be done at all"
            found = point(way)
            prices[price] = found[0] + price * found[1]
            return found

        def between(fast: tuple[float, float], lean: tuple[float, float], depth: int) -> None:
            if depth > 0 and fast[1] > lean[1] * (1 + 1e-6) and fast[0] < lean[0]:
                price = (lean[0] - fast[0]) / (fast[1] - lean[1])
                found = solved(price)
                between(fast, found, depth - 1)
                between(found, lean, depth - 1)

        leanest = self._solve(tables, kept + 1e-12 * busy)
        if leanest is None:
            return None
        between(solved(0.0), point(leanest), DEPTH)
        every = np.array(sorted(prices.items()))
        more = np.interp(np.arange(0, len(every), 1 / BETWEEN), np.arange(len(every)), every[:, 0])
        least = np.interp(more, every[:, 0], every[:, 1])  # the least bends down, so that between two it is more
        return LeastCosts(more, least - self._added, point(leanest)[1])

    @cached_property
    def _added(self) -> float:
        """Seconds that parameters add to the kernels of a microbatch, at most."""
        held = ParameterBounds(self.plain.skeleton, self.plain.storage_options, self.overlap)
        return held.most(self._busy) / self.microbatches

    def _between(
        self, fast: StageSolution, lean: StageSolution, weights: np.ndarray, depth: int = DEPTH
    ) -> list[StageSolution]:
        """Ways on the lower hull of time and memory, by halving."""
        more = self._time(lean) - self._time(fast)
        less = float(weights @ (fast.total - lean.total)[:COUNT])
        if depth == 0 or less <= 0 or more <= 0:
            return []
        price = more / less
        found = self._solve(self.again or self.plain, self.time + price * weights)
        if found is None:
            return []
        worth = self.time + price * weights
        if float(worth @ found.total[:COUNT]) > (1 - 1e-4) * float(worth @ fast.total[:COUNT]):
            return []
        return [
            *self._between(fast, found, weights, depth - 1), found, *self._between(found, lean, weights, depth - 1)
        ]  # fmt: skip

    def _solve(self, tables: Tables, weights: np.ndarray) -> StageSolution | None:
        if max(tables.sizes) == 1:  # one device, and nothing to choose
            return self._way(tables, np.zeros(len(tables.sizes), dtype=np.intp))
        if id(tables) not in self._eliminations:
            self._eliminations[id(tables)] = self.solver.elimination(tables)
        elimination = self._eliminations[id(tables)]
        run = elimination.run(weights) if elimination is not None else None
        return self._way(tables, run.walk()) if run is not None and math.isfinite(run.value) else None

    def _way(self, tables: Tables, states: np.ndarray) -> StageSolution:
        where = self.where[bool(tables.skeleton.layers)]
        cells, offsets, strides = self._stacked(tables)
        at = offsets[where.tables] + (states[where.rows] * strides[where.tables]).sum(axis=1)
        used = cells[at]
        total = np.zeros((where.blocks.count, COLUMNS))
        total[where.filled] = np.add.reduceat(used, where.firsts, axis=0)
        runs = np.concatenate([np.zeros((1, COLUMNS)), np.cumsum(total, axis=0)])
        return StageSolution(states, tables, runs, tuple((blocks, used[entry]) for entry, blocks in where.shared))

    def _stacked(self, tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The cells of all tables one after the other, where each table begins, and the strides of its variables."""
        if id(tables) not in self._cells:
            kinds, width = list(tables.skeleton.tables), self.where[bool(tables.skeleton.layers)].rows.shape[1]
            counts = [math.prod(array.shape[:-1]) for array in tables.arrays]
            offsets = np.cumsum([0, *counts])
            cells, strides = np.zeros((offsets[-1], COLUMNS)), np.zeros((len(counts), width), dtype=np.intp)
            for at, (kind, array) in enumerate(zip(kinds, tables.arrays, strict=True)):
                part, size = cells[offsets[at] : offsets[at + 1]], 1
                part[:, :COUNT] = array.reshape(-1, COUNT)
                if isinstance(kind, OpTable):
                    held = self._weights(tables, kind.kind)
                    part[:, COUNT:] = held if array.ndim == 2 else held.repeat(array.shape[1], axis=0)
                for variable in reversed(range(array.ndim - 1)):
                    strides[at, variable] = size
                    size *= array.shape[variable]
            self._cells[id(tables)] = cells, offsets[:-1], strides
        return self._cells[id(tables)]

    def _weights(self, tables: Tables, kind: int) -> np.ndarray:
        """[state, (seconds, bytes)]: backward's part for weights of a product, and what it needs for that."""
        if kind not in self._extra:
            self._extra[kind] = weights_of(tables, kind)
        return self._extra[kind]


def weights_of(tables: Tables, kind: int) -> np.ndarray:
    """For each state of a kind of op the seconds of its weights' gradients, and the bytes that wait for them."""
    spaces = tables.spaces
    op, space = spaces.kinds.first[kind], spaces.of(kind)
    signature = spaces.analysis.signatures[op.name]
    found = np.zeros((space.size, 2))
    values, graph = tables.graph.values, tables.graph
    trained = [graph.parameter_of(name) is not None and values[name].gradient for name in op.inputs]
    given = [values[name].gradient for name in op.inputs]
    if not is_matmul(signature) or not any(trained) or not spaces.backward:
        return found
    share = sum(trained) / max(sum(given), 1)
    for state, choice in enumerate(space.choices):
        call = local_call(signature, choice, spaces.mesh, spaces.training)
        others = sum(held.bytes for held, own in zip(call.inputs, trained, strict=True) if not own)
        found[state] = (
            share * space.used[state, Resource.COMPUTE_BACKWARD], others + sum(held.bytes for held in call.outputs)
        )  # fmt: skip
    return found


def _undominated(ways: Sequence[StageSolution], time: np.ndarray, weights: np.ndarray) -> list[StageSolution]:
    ordered = sorted(ways, key=lambda way: (float(time @ way.total[:COUNT]), float(weights @ way.total[:COUNT])))
    found: list[StageSolution] = []
    least = math.inf
    for way in ordered:
        held = float(weights @ way.total[:COUNT])
        if held < least * (1 - 1e-6):
            found.append(way)
            least = held
    return found


__all__ = ["COLUMNS", "QUEUED", "WEIGHT", "Blocks", "StageFront", "StageSolution"]

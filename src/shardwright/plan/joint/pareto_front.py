"""What the blocks of a graph cost on one kind of pipeline rank, at one number of microbatches: a Pareto front of time
and memory.

Each point is a solution for all ops at once, at some price of memory: the fastest, the leanest, and some in between.
The cost of every block is known for each, so the cost of a stage, which is a run of blocks, is a difference of two
sums. Solutions of different blocks can be mixed; what that loses at the seams is found when the stages of a pipeline
are solved by themselves (`solved_stages`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from ...cost import is_matmul, local_call
from ...cost.reshard_prices import NEVER
from ...cost.resources import COUNT, Resource, memory, phases, row
from ..problem_structure import OpTable
from ..search.elimination import Elimination, TooWide, eliminate
from ..tables import Tables
from .bounds import LeastCosts, ParameterBounds
from .stage_cuts import BlockOfEntries


class Solver:
    """Finds the elimination steps once for each structure."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, tuple[int, ...] | None], tuple[Elimination, list[int]]] = {}

    def elimination(self, tables: Tables) -> Elimination | None:
        """None if the graph is too wide to be eliminated."""
        if not tables.is_plain:  # then its groups differ from those of other tables
            return self._eliminate(tables)
        known = self._known.get((id(tables.skeleton), tables.sizes)) or self._known.get((id(tables.skeleton), None))
        refitted = known[0].fitting([tables.arrays[number] for number in known[1]]) if known is not None else None
        if refitted is not None:
            return refitted
        new = self._eliminate(tables)
        if new is not None:
            entry = (new, self._numbers(tables, new))
            self._known[id(tables.skeleton), tables.sizes] = entry
            self._known.setdefault((id(tables.skeleton), None), entry)
        return new

    def _eliminate(self, tables: Tables) -> Elimination | None:
        try:
            return eliminate(tables.problem())
        except TooWide:
            return None

    def _numbers(self, tables: Tables, elimination: Elimination) -> list[int]:
        """The table of each group."""
        number = {id(array): at for at, array in enumerate(tables.arrays)}
        return [number[id(group.table)] for group in elimination.groups]


WEIGHT, QUEUED = COUNT, COUNT + 1
"""Columns after the resources: seconds of weight gradients in backward, and bytes saved until they are computed."""

COLUMNS = COUNT + 2

BUSY = ("compute_forward", "compute_backward", "send_forward", "send_backward")
"""What ops and reshards use. Parameters use little of these, and only parameters use the others."""

BETWEEN = 4
"""Prices per interval between two solved prices of memory; bounds are evaluated at all of them."""

DEPTH = 2
"""How often the gap between two solutions is halved."""


@dataclass(frozen=True, eq=False)
class StageSolution:
    """One solution for all blocks. `runs`: the sums over all blocks before each bound, [bound, column]."""

    states: np.ndarray
    tables: Tables
    runs: np.ndarray
    shared: tuple[
        tuple[tuple[int, ...], np.ndarray], ...
    ]  # parameters of several blocks: the blocks, and the cost of one copy

    @cached_property
    def total(self) -> np.ndarray:
        total: np.ndarray = self.runs[-1]
        return total

    def between(self, begin: int, end: int) -> np.ndarray:
        """What a run of blocks uses, with a copy of each parameter shared with earlier blocks."""
        used: np.ndarray = self.runs[end] - self.runs[begin]
        for blocks, cost in self.shared:
            if blocks[0] < begin and any(begin <= block < end for block in blocks):
                used = used + cost
        return used

    @cached_property
    def picked(self) -> tuple[int, ...]:
        """The states in the form that the tables take."""
        return tuple(self.states.tolist())

    def table(self, width: int) -> np.ndarray:
        """[first block, blocks less one, column] for all runs of up to `width` blocks."""
        count = len(self.runs) - 1
        first = np.arange(count)[:, None]
        last = np.minimum(first + 1 + np.arange(width)[None, :], count)
        used: np.ndarray = self.runs[last] - self.runs[first]
        for blocks, cost in self.shared:
            starts = np.zeros(count + 1)
            starts[np.array(blocks) + 1] = 1.0
            inside = np.cumsum(starts)
            repeated = (inside[last] > inside[first]) & (first > blocks[0])
            used[repeated] += cost
        return used


class StageFront:
    """The solutions of one kind of pipeline rank at one number of microbatches."""

    def __init__(
        self,
        plain: Tables,
        recomputing: Callable[[], Tables | None],
        where: dict[bool, BlockOfEntries],
        solver: Solver,
        microbatches: int,
    ) -> None:
        """`recomputing` builds the tables with activation checkpointing, on first use."""
        self.plain, self._make_recomputing, self.where, self.solver, self.microbatches = (
            plain,
            recomputing,
            where,
            solver,
            microbatches,
        )
        self.overlap = plain.moves.cluster.overlap
        self.time = np.sum([forms[0] for forms in phases(self.overlap, microbatches)], axis=0)
        self._busy = self.time * sum(row(**{name: 1.0}) for name in BUSY)
        self._solutions: dict[float, list[StageSolution]] = {}
        self._extra: dict[int, np.ndarray] = {}
        self._eliminations: dict[int, Elimination | None] = {}
        self._cells: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    @cached_property
    def recomputing(self) -> Tables | None:
        return self._make_recomputing()

    @cached_property
    def fastest(self) -> StageSolution | None:
        """Ignoring memory; None if there is no solution at all."""
        solution = self._solve(self.plain, self.time)
        return solution if solution is not None and self._time(solution) < NEVER / 2 else None

    def _time(self, solution: StageSolution) -> float:
        return float(self.time @ solution.total[:COUNT])

    @cached_property
    def least(self) -> float:
        """A lower bound on the seconds of a microbatch in all blocks, of ops and reshards alone."""
        if self.fastest is None:
            return math.inf
        return float(self._busy @ self.fastest.total[:COUNT]) / self.microbatches - self._added

    def solutions(self, flight: float) -> list[StageSolution]:
        """The solutions on the front if `flight` microbatches are in flight, the fastest first."""
        if self.fastest is None:
            return []
        if flight not in self._solutions:
            weights = memory() + (flight - 1.0) * row(kept=1.0)
            tables = self.recomputing or self.plain
            lean = self._solve(tables, weights + 1e-9 * self.time)
            candidates = (
                [self.fastest] if lean is None else [self.fastest, *self._between(self.fastest, lean, weights), lean]
            )
            self._solutions[flight] = _undominated(candidates, self.time, weights)
        return self._solutions[flight]

    def tight(self, times: float, flight: float, room: float) -> LeastCosts:
        """Roughly the least cost of a step if all blocks are on one pipeline rank, at some prices of memory.

        `times`: microbatches, including those waited for; `flight`: microbatches in flight. If the fastest solution
        fits, it is the only point.
        """
        assert self.fastest is not None
        weights = memory() + (flight - 1.0) * row(kept=1.0)

        def point(solution: StageSolution) -> tuple[float, float]:
            used = solution.total[:COUNT]
            once = float(used[Resource.UPDATE])
            return (float(self.time @ used) - once) * times / self.microbatches + once, float(weights @ used)

        first = point(self.fastest)
        if first[1] <= room:
            return LeastCosts(np.zeros(1), np.array(first[:1]))
        points = [point(solution) for solution in self.solutions(flight)]
        costs = [(0.0, first[0])]
        for (fast, more), (slow, less) in pairwise(points):
            if slow > fast and less < more:
                price = (slow - fast) / (more - less)
                costs.append((price, slow + price * less))
        prices, least = np.array(costs).T
        return LeastCosts(prices, least, points[-1][1])

    @cached_property
    def floor(self) -> LeastCosts | None:
        """The least cost of a microbatch in ops and reshards, at some prices of the bytes it saves for backward.

        Unlike `tight` it is a true bound: nothing costs less at its price, whatever is recomputed. None if the graph is
        too wide to be solved with activation checkpointing.
        """
        busy, saved, tables = self._busy / self.microbatches, row(kept=1.0), self.recomputing or self.plain
        prices: dict[float, float] = {}

        def point(solution: StageSolution) -> tuple[float, float]:
            return float(busy @ solution.total[:COUNT]), float(solution.total[Resource.KEPT])

        def solved(price: float) -> tuple[float, float]:
            solution = self._solve(tables, busy + price * saved)
            assert solution is not None, "what is feasible at one price is feasible at all"
            cost = point(solution)
            prices[price] = cost[0] + price * cost[1]
            return cost

        def between(fast: tuple[float, float], lean: tuple[float, float], depth: int) -> None:
            if depth > 0 and fast[1] > lean[1] * (1 + 1e-6) and fast[0] < lean[0]:
                price = (lean[0] - fast[0]) / (fast[1] - lean[1])
                cost = solved(price)
                between(fast, cost, depth - 1)
                between(cost, lean, depth - 1)

        leanest = self._solve(tables, saved + 1e-12 * busy)
        if leanest is None:
            return None
        between(solved(0.0), point(leanest), DEPTH)
        every = np.array(sorted(prices.items()))
        more = np.interp(np.arange(0, len(every), 1 / BETWEEN), np.arange(len(every)), every[:, 0])
        least = np.interp(
            more, every[:, 0], every[:, 1]
        )  # the least cost is concave in the price: interpolation is a lower bound
        return LeastCosts(more, least - self._added, point(leanest)[1])

    @cached_property
    def _added(self) -> float:
        """The most seconds that parameters add to the kernels of a microbatch."""
        parameters = ParameterBounds(self.plain.skeleton, self.plain.storage_options, self.overlap)
        return parameters.most(self._busy) / self.microbatches

    def _between(
        self, fast: StageSolution, lean: StageSolution, weights: np.ndarray, depth: int = DEPTH
    ) -> list[StageSolution]:
        """Solutions on the lower hull of time and memory, by bisection."""
        more = self._time(lean) - self._time(fast)
        less = float(weights @ (fast.total - lean.total)[:COUNT])
        if depth == 0 or less <= 0 or more <= 0:
            return []
        price = more / less
        middle = self._solve(self.recomputing or self.plain, self.time + price * weights)
        if middle is None:
            return []
        worth = self.time + price * weights
        if float(worth @ middle.total[:COUNT]) > (1 - 1e-4) * float(worth @ fast.total[:COUNT]):
            return []
        return [
            *self._between(fast, middle, weights, depth - 1), middle, *self._between(middle, lean, weights, depth - 1)
        ]  # fmt: skip

    def _solve(self, tables: Tables, weights: np.ndarray) -> StageSolution | None:
        if max(tables.sizes) == 1:  # one device, and nothing to choose
            return self._solution(tables, np.zeros(len(tables.sizes), dtype=np.intp))
        if id(tables) not in self._eliminations:
            self._eliminations[id(tables)] = self.solver.elimination(tables)
        elimination = self._eliminations[id(tables)]
        run = elimination.run(weights) if elimination is not None else None
        return self._solution(tables, run.walk()) if run is not None and math.isfinite(run.value) else None

    def _solution(self, tables: Tables, states: np.ndarray) -> StageSolution:
        where = self.where[bool(tables.skeleton.layers)]
        cells, offsets, strides = self._stacked(tables)
        at = offsets[where.tables] + (states[where.variables] * strides[where.tables]).sum(axis=1)
        used = cells[at]
        total = np.zeros((where.blocks.count, COLUMNS))
        total[where.filled] = np.add.reduceat(used, where.firsts, axis=0)
        runs = np.concatenate([np.zeros((1, COLUMNS)), np.cumsum(total, axis=0)])
        return StageSolution(states, tables, runs, tuple((blocks, used[entry]) for entry, blocks in where.shared))

    def _stacked(self, tables: Tables) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The cells of all tables one after the other, where each table begins, and the strides of its variables."""
        if id(tables) not in self._cells:
            kinds, width = list(tables.skeleton.tables), self.where[bool(tables.skeleton.layers)].variables.shape[1]
            counts = [math.prod(array.shape[:-1]) for array in tables.arrays]
            offsets = np.cumsum([0, *counts])
            cells, strides = np.zeros((offsets[-1], COLUMNS)), np.zeros((len(counts), width), dtype=np.intp)
            for at, (kind, array) in enumerate(zip(kinds, tables.arrays, strict=True)):
                part, size = cells[offsets[at] : offsets[at + 1]], 1
                part[:, :COUNT] = array.reshape(-1, COUNT)
                if isinstance(kind, OpTable):
                    weights = self._weights(tables, kind.kind)
                    part[:, COUNT:] = weights if array.ndim == 2 else weights.repeat(array.shape[1], axis=0)
                for variable in reversed(range(array.ndim - 1)):
                    strides[at, variable] = size
                    size *= array.shape[variable]
            self._cells[id(tables)] = cells, offsets[:-1], strides
        return self._cells[id(tables)]

    def _weights(self, tables: Tables, kind: int) -> np.ndarray:
        """[state, (seconds, bytes)]: the weight-gradient part of a matmul's backward, and the bytes it needs."""
        if kind not in self._extra:
            self._extra[kind] = weights_of(tables, kind)
        return self._extra[kind]


def weights_of(tables: Tables, kind: int) -> np.ndarray:
    """For each state of a kind of op the seconds of its weight gradients, and the bytes saved until then."""
    spaces = tables.spaces
    op, space = spaces.kinds.first[kind], spaces.of(kind)
    signature = spaces.analysis.signatures[op.name]
    weights = np.zeros((space.size, 2))
    values, graph = tables.graph.values, tables.graph
    trained = [graph.parameter_of(name) is not None and values[name].gradient for name in op.inputs]
    differentiable = [values[name].gradient for name in op.inputs]
    if not is_matmul(signature) or not any(trained) or not spaces.backward:
        return weights
    share = sum(trained) / max(sum(differentiable), 1)
    for state, choice in enumerate(space.choices):
        call = local_call(signature, choice, spaces.mesh, spaces.training)
        others = sum(tensor.bytes for tensor, own in zip(call.inputs, trained, strict=True) if not own)
        weights[state] = (
            share * space.used[state, Resource.COMPUTE_BACKWARD], others + sum(tensor.bytes for tensor in call.outputs)
        )  # fmt: skip
    return weights


def _undominated(solutions: Sequence[StageSolution], time: np.ndarray, weights: np.ndarray) -> list[StageSolution]:
    ordered = sorted(
        solutions, key=lambda solution: (float(time @ solution.total[:COUNT]), float(weights @ solution.total[:COUNT]))
    )
    front: list[StageSolution] = []
    least = math.inf
    for solution in ordered:
        bytes = float(weights @ solution.total[:COUNT])
        if bytes < least * (1 - 1e-6):
            front.append(solution)
            least = bytes
    return front

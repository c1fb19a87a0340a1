"""Where a graph may be cut into stages, and where to cut it so that the pipeline is fastest.

A graph has more places than a search can try. Its ops are in *blocks*, the runs between the places that are kept:
those at which the fewest bytes cross among their neighbours, within about a layer; if there are still too many, the
lightest crossing of each of `MOST` equal parts of the work.

    stages      stage s, from bound i to bound i + 1 + w, takes stages[s][i, w] for a microbatch (infinity: never)
    entering    what is added where stage s begins at bound i, entering[s][i]: values that cross to it
    time        rounds * (the slowest stage) + fill * (the sum of all stages and of what enters)      StageCuts.seconds

For a cap on the slowest stage, dynamic programming from the end gives the least sum (`_least_sum`). The lowest
feasible cap comes first (`_lowest_cap`); higher ones are tried while they save more of the sum than they cost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cost import TrainingSetup, flops
from ...errors import PlanError
from ...ir import Op
from ...ir.recompute import layers_of
from ..problem_structure import FactorEntry, OpTable, ProblemStructure, StorageTable, Table
from ..stages import OpSequence

MOST = 256
FEW = 48
"""Up to this many places, all are tried."""

Ints = NDArray[np.intp]


class Blocks:
    """The bounds at which stages may be cut, and the block of every op.

    places      on the op sequence: places[0] = 0 < ... < its end
    crossing    bytes of the global batch that cross each bound: of values with a batch dim, and of values without one,
                which every microbatch sends again
    """

    def __init__(
        self,
        line: OpSequence,
        training: TrainingSetup,
        *,
        pivots: Sequence[Op] = (),
        uncut: Iterable[Sequence[Op]] = (),
    ) -> None:
        """`pivots`: ops before which there must be a bound. `uncut`: groups of ops with no bound inside."""
        self.line, self.training = line, training
        self.graph, self.analysis = line.graph, line.analysis
        self.weights = np.array([flops(self.analysis.signatures[op.name]) for op in line.ops])
        uncut_spans = [self._span(ops) for ops in uncut]
        pivot_at = {self._place(op): op for op in pivots}
        allowed = [at for at in line.places if not any(first < at <= last for first, last in uncut_spans)]
        self.places: tuple[int, ...] = (0, *sorted({*self._picked(allowed), *pivot_at} - {0}), len(line.ops))
        self.pivots = tuple(self.places.index(at) for at in pivot_at if at > 0)

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.places) - 1

    def _span(self, ops: Sequence[Op]) -> tuple[int, int]:
        """The first and the last place of some ops on the line."""
        places = [self.line.place[op.name] for op in ops if op.name in self.line.place]
        return (min(places), max(places)) if places else (0, 0)

    def _place(self, pivot: Op) -> int:
        """The place before a module: that of its first op in the sequence."""
        after = self.graph.ops[self.graph.ops.index(pivot) :]
        at = next((self.line.place[op.name] for op in after if op.name in self.line.place), 0)
        ops = self.line.ops
        if at and ops[at].region is not None and ops[at].region == ops[at - 1].region:
            raise PlanError(f"a stage can't begin before {pivot}: it is inside a checkpointed region")
        return at

    def _picked(self, allowed: Sequence[int]) -> list[int]:
        if len(allowed) <= FEW:
            return list(allowed)
        load = np.concatenate([[0.0], np.cumsum(self.weights)])
        load /= load[-1] or 1.0
        crossing = self.line.crossing
        near = 0.5 / max(len(layers_of(self.graph)), 16)
        loads = np.array([load[at] for at in allowed])
        crossing_bytes = np.array([crossing[at] for at in allowed], dtype=float)
        local_minima = []
        for index, at in enumerate(allowed):
            first, last = np.searchsorted(loads, (loads[index] - near, loads[index] + near))
            if crossing_bytes[index] <= crossing_bytes[first : max(last, index + 1)].min():
                local_minima.append(at)
        if len(local_minima) <= MOST:
            return local_minima
        parts: dict[int, int] = {}
        for at in local_minima:
            part = min(int(load[at] * MOST), MOST - 1)
            if part not in parts or crossing[at] < crossing[parts[part]]:
                parts[part] = at
        return list(parts.values())

    @cached_property
    def block_of(self) -> dict[str, int]:
        """The block of every op; ops outside of the sequence are in the block of their first reader."""
        blocks: dict[str, int] = {}
        for number in range(self.count):
            for op in self.line.ops[self.places[number] : self.places[number + 1]]:
                blocks[op.name] = number
        for op in reversed(self.graph.ops):
            if op.name not in blocks:
                readers = [blocks[user.name] for name in op.outputs for user, _ in self.graph.users[name]]
                blocks[op.name] = min(readers, default=self.count - 1)
        return blocks

    @cached_property
    def crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that cross each bound, for the global batch: of values with a batch dim, and of values without one."""
        line, analysis = self.line, self.analysis
        batched, unbatched = np.zeros(len(line.ops) + 1), np.zeros(len(line.ops) + 1)
        for name, last in line.last_use.items():
            value = self.graph.values[name]
            batch = any(atom in analysis.batch for dim in analysis.dims[name] for atom in analysis.atoms.expand(dim))
            crossing = batched if batch else unbatched
            crossing[line.producer_at[name] + 1] += value.elements * self.training.item(value)
            crossing[last + 1] -= value.elements * self.training.item(value)
        at = list(self.places)
        return np.maximum(np.cumsum(batched)[at], 0.0), np.maximum(np.cumsum(unbatched)[at], 0.0)


class BlockOfEntries:
    """The block of each entry of a problem structure. Entries are sorted by block.

    tables       the number of each entry's table
    variables    of each entry: [entry, most variables], padded with 0; `counts` says how many are real
    firsts       where the entries of each block begin
    shared       parameters that several blocks use: the entry, and the blocks
    """

    def __init__(self, skeleton: ProblemStructure, blocks: Blocks) -> None:
        self.skeleton, self.blocks = skeleton, blocks
        kinds = list(skeleton.tables)
        values = {parameter.key: parameter.value for parameter in skeleton.graph.parameters}
        places: list[int] = []
        shared: list[tuple[int, tuple[int, ...]]] = []
        for number, entry in enumerate(skeleton.entries):
            if isinstance(kinds[entry.table], StorageTable):
                used = self._users(values[entry.name])
                places.append(used[0])
                if len(used) > 1:
                    shared.append((number, tuple(used)))
            else:
                places.append(self._block(kinds[entry.table], entry))
        order = np.argsort(places, kind="stable")
        sorted_places = np.array(places, dtype=np.intp)[order]
        self.filled, self.firsts = np.unique(sorted_places, return_index=True)
        entries = [skeleton.entries[at] for at in order]
        self.tables: Ints = np.array([entry.table for entry in entries], dtype=np.intp)
        self.counts = np.array([len(entry.variables) for entry in entries], dtype=np.intp)
        most = int(self.counts.max())
        padded = [(*entry.variables, *[0] * (most - len(entry.variables))) for entry in entries]
        self.variables: Ints = np.array(padded, dtype=np.intp)
        back = {int(at): index for index, at in enumerate(order)}
        self.shared = [(back[number], used) for number, used in shared]
        self.places: Ints = sorted_places
        self.block: Ints = self._blocks_of_variables()

    def _blocks_of_variables(self) -> Ints:
        """The block of each op and each hub; -1 for parameters and layers, which may be in several blocks."""
        skeleton = self.skeleton
        blocks = np.full(len(skeleton.variables), -1, dtype=np.intp)
        for name, variable in skeleton.ops.items():
            blocks[variable] = self.blocks.block_of[name]
        for value, variable in skeleton.hubs.items():
            blocks[variable] = self.blocks.block_of[skeleton.graph.producer[value].name]
        return blocks

    def entries(self, begin: int, end: int) -> Ints:
        """The entries of a run of blocks, including parameters shared with other blocks."""
        inside = np.flatnonzero((self.places >= begin) & (self.places < end))
        more = [at for at, used in self.shared if used[0] < begin and any(begin <= block < end for block in used)]
        return np.concatenate([inside, np.array(more, dtype=np.intp)]).astype(np.intp)

    def outside(self, begin: int, end: int) -> np.ndarray:
        """Which variables a run of blocks can't choose: those of other blocks, and of values it passes to them."""
        fixed = (self.block >= 0) & ((self.block < begin) | (self.block >= end))
        others = np.flatnonzero((self.places < begin) | (self.places >= end))
        real = np.arange(self.variables.shape[1])[None, :] < self.counts[others][:, None]
        touched = np.unique(self.variables[others][real])
        fixed[touched[self.block[touched] >= 0]] = True
        for name in self.skeleton.together:  # one variable stands for ops of several blocks
            fixed[self.skeleton.ops[name]] = True
        return fixed

    def _users(self, value: str) -> list[int]:
        graph, block_of = self.skeleton.graph, self.blocks.block_of
        return sorted({block_of[user.name] for user, _ in graph.users[value] if user.name in self.skeleton.ops})

    def _block(self, table: Table, entry: FactorEntry) -> int:
        """A reshard for one reader is in the reader's block, one for several readers in the producer's."""
        block_of, graph = self.blocks.block_of, self.skeleton.graph
        if isinstance(table, OpTable):
            return block_of[entry.name]
        return block_of[entry.reader or graph.producer[entry.name].name]


Floats = NDArray[np.float64]

MOST_CAPS = 24
"""Caps on the slowest stage that are tried; if there are more, they are sampled evenly."""


class StageCuts(NamedTuple):
    """Bounds of the stages (the first 0, the last the number of blocks), and what they cost."""

    bounds: tuple[int, ...]
    slowest: float
    total: float  # the sum of all stages and of what enters
    seconds: float


def cut_into_stages(
    stages: Sequence[Floats], entering: Sequence[Floats], rounds: float, fill: float = 1.0
) -> StageCuts | None:
    """The best cuts, or None if there are none."""
    ends = _ends(stages[0])
    low = _lowest_cap(stages, ends)
    if math.isinf(low):
        return None
    free = _least_sum(stages, ends, entering, math.inf)
    best = _score(stages, free, entering, rounds, fill)
    if best.slowest > low and rounds:
        first = _score(stages, _least_sum(stages, ends, entering, low), entering, rounds, fill)
        gain = fill * max(0.0, first.total - best.total) / rounds
        best = min(best, first, key=lambda cuts: cuts.seconds)
        for cap in _caps(stages, low, low + gain):
            cuts = _score(stages, _least_sum(stages, ends, entering, cap), entering, rounds, fill)
            best = min(best, cuts, key=lambda cuts: cuts.seconds)
    return best


def _ends(stage: Floats) -> NDArray[np.intp]:
    """For each cell of a stage its last bound; a stage past the last block ends one further."""
    starts, widths = stage.shape
    ends: NDArray[np.intp] = np.minimum(np.arange(starts)[:, None] + 1 + np.arange(widths)[None, :], starts + 1)
    return ends


def _lowest_cap(stages: Sequence[Floats], ends: NDArray[np.intp]) -> float:
    after = _at_the_end(len(stages[0]))
    for stage in reversed(stages):
        after = _padded(np.maximum(stage, after[ends]).min(axis=1))
    return float(after[0])


def _at_the_end(starts: int) -> Floats:
    least = np.full(starts + 2, np.inf)
    least[starts] = 0.0
    return least


def _padded(values: Floats) -> Floats:
    """Infinity for the end of the last block, where no stage begins, and for beyond."""
    return np.append(values, (np.inf, np.inf))


def _least_sum(
    stages: Sequence[Floats], ends: NDArray[np.intp], entering: Sequence[Floats], cap: float
) -> tuple[int, ...]:
    """The bounds with the least sum, with no stage slower than the cap."""
    after = _at_the_end(len(stages[0]))
    picks: list[NDArray[np.intp]] = []
    for number in range(len(stages) - 1, -1, -1):
        sums = np.where(stages[number] <= cap, stages[number], np.inf) + after[ends]
        pick = sums.argmin(axis=1)
        least = sums[np.arange(len(sums)), pick]
        after = _padded(least + entering[number][: len(sums)] if number else least)
        picks.append(pick)
    bounds = [0]
    for pick in reversed(picks):
        bounds.append(bounds[-1] + 1 + int(pick[bounds[-1]]))
    return tuple(bounds)


def _score(
    stages: Sequence[Floats], bounds: tuple[int, ...], entering: Sequence[Floats], rounds: float, fill: float
) -> StageCuts:
    pairs = zip(stages, bounds, bounds[1:], strict=False)
    each = [float(stage[begin, end - begin - 1]) for stage, begin, end in pairs]
    total = sum(each) + float(sum(more[begin] for more, begin in zip(entering[1:], bounds[1:-1], strict=True)))
    return StageCuts(bounds, max(each), total, rounds * max(each) + fill * total)


def _caps(stages: Sequence[Floats], low: float, high: float) -> list[float]:
    distinct = {id(stage): stage for stage in stages}.values()
    values = np.unique(np.concatenate([stage[(stage > low) & (stage <= high)] for stage in distinct]))
    if len(values) > MOST_CAPS:
        values = values[np.linspace(0, len(values) - 1, MOST_CAPS).astype(int)]
    caps: list[float] = values.tolist()
    return caps

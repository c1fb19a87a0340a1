"""The line of a graph in blocks: the runs between places where a search over cuts may cut.

A line has more places than anybody wants to look at. Those are left at which least crosses among their neighbours,
within about a layer; if there are still too many, the lightest crossing of each of `MOST` equal parts of the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from ...cost import TrainingSetup, flops
from ...errors import PlanError
from ...ir import Op
from ..problem_structure import FactorEntry, OpTable, ProblemStructure, StorageTable, Table
from ..recompute import layers_of
from ..stages import OpSequence

MOST = 256
FEW = 48
"""Up to so many places all are looked at."""

Ints = NDArray[np.intp]


class Blocks:
    """The bounds that cuts may be at, and which block everything is in.

    places      on the line: cuts[0] = 0 < ... < the end of the line
    crossing    bytes of a whole batch that cross each bound: of what has rows, and of what every microbatch sends again
    """

    def __init__(
        self,
        line: OpSequence,
        training: TrainingSetup,
        *,
        pivots: Sequence[Op] = (),
        uncut: Iterable[Sequence[Op]] = (),
    ) -> None:
        """`pivots`: ops before which there is a bound. `uncut`: ops between which there is none."""
        self.line, self.training = line, training
        self.graph, self.analysis = line.graph, line.analysis
        self.weights = np.array([flops(self.analysis.signatures[op.name]) for op in line.ops])
        whole = [self._span(ops) for ops in uncut]
        asked = {self._place(op): op for op in pivots}
        allowed = [at for at in line.places if not any(first < at <= last for first, last in whole)]
        self.places: tuple[int, ...] = (0, *sorted({*self._picked(allowed), *asked} - {0}), len(line.ops))
        self.pivots = tuple(self.places.index(at) for at in asked if at > 0)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return len(self.places) - 1

    def _span(self, ops: Sequence[Op]) -> tuple[int, int]:
        """The first and the last place of some ops on the line."""
        places = [self.line.place[op.name] for op in ops if op.name in self.line.place]
        return (min(places), max(places)) if places else (0, 0)

    def _place(self, pivot: Op) -> int:
        """The place before a module, by the first op of it that is on the line."""
        after = self.graph.ops[self.graph.ops.index(pivot) :]
        at = next((self.line.place[op.name] for op in after if op.name in self.line.place), 0)
        ops = self.line.ops
        if at and ops[at].region is not None and ops[at].region == ops[at - 1].region:
            raise PlanError(f"a stage can't begin before {pivot}: it is inside of a checkpointed region")
        return at

    def _picked(self, allowed: Sequence[int]) -> list[int]:
        if len(allowed) <= FEW:
            return list(allowed)
        load = np.concatenate([[0.0], np.cumsum(self.weights)])
        load /= load[-1] or 1.0
        crossing = self.line.crossing
        near = 0.5 / max(len(layers_of(self.graph)), 16)
        where = np.array([load[at] for at in allowed])
        bytes = np.array([crossing[at] for at in allowed], dtype=float)
        found = []
        for index, at in enumerate(allowed):
            first, last = np.searchsorted(where, (where[index] - near, where[index] + near))
            if bytes[index] <= bytes[first : max(last, index + 1)].min():
                found.append(at)
        if len(found) <= MOST:
            return found
        parts: dict[int, int] = {}
        for at in found:
            part = min(int(load[at] * MOST), MOST - 1)
            if part not in parts or crossing[at] < crossing[parts[part]]:
                parts[part] = at
        return list(parts.values())

    @cached_property
    def block_of(self) -> dict[str, int]:
        """The block of every op; those off the line are in that of their first reader."""
        found: dict[str, int] = {}
        for number in range(self.count):
            for op in self.line.ops[self.places[number] : self.places[number + 1]]:
                found[op.name] = number
        for op in reversed(self.graph.ops):
            if op.name not in found:
                readers = [found[user.name] for name in op.outputs for user, _ in self.graph.users[name]]
                found[op.name] = min(readers, default=self.count - 1)
        return found

    @cached_property
    def crossing(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes that cross each bound, for a whole batch: those of rows, and those that have none."""
        line, analysis = self.line, self.analysis
        rows, rest = np.zeros(len(line.ops) + 1), np.zeros(len(line.ops) + 1)
        for name, last in line.last_use.items():
            value = self.graph.values[name]
            batch = any(atom in analysis.batch for dim in analysis.dims[name] for atom in analysis.atoms.expand(dim))
            held = rows if batch else rest
            held[line.producer_at[name] + 1] += value.elements * self.training.item(value)
            held[last + 1] -= value.elements * self.training.item(value)
        at = list(self.places)
        return np.maximum(np.cumsum(rows)[at], 0.0), np.maximum(np.cumsum(rest)[at], 0.0)


class BlockOfEntries:
    """In which block each entry of a skeleton is. Entries are sorted by blocks.

    tables    the number of each entry's table
    rows      its variables: [entry, 4], the last one again where there are fewer
    firsts    where the entries of each block begin
    shared    parameters that several blocks use: the entry, and the blocks
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
        self.rows: Ints = np.array(padded, dtype=np.intp)
        back = {int(at): index for index, at in enumerate(order)}
        self.shared = [(back[number], used) for number, used in shared]
        self.places: Ints = sorted_places
        self.block: Ints = self._blocks_of_variables()

    def _blocks_of_variables(self) -> Ints:
        """The block of each op and of each hub; -1 for parameters and layers, which may be in several."""
        skeleton = self.skeleton
        found = np.full(len(skeleton.variables), -1, dtype=np.intp)
        for name, variable in skeleton.ops.items():
            found[variable] = self.blocks.block_of[name]
        for value, variable in skeleton.hubs.items():
            found[variable] = self.blocks.block_of[skeleton.graph.producer[value].name]
        return found

    def entries(self, begin: int, end: int) -> Ints:
        """The entries of a run of blocks, with the parameters that other blocks use too."""
        inside = np.flatnonzero((self.places >= begin) & (self.places < end))
        more = [at for at, used in self.shared if used[0] < begin and any(begin <= block < end for block in used)]
        return np.concatenate([inside, np.array(more, dtype=np.intp)]).astype(np.intp)

    def outside(self, begin: int, end: int) -> np.ndarray:
        """Which variables a run of blocks can't choose: those of other blocks, and of what it hands on to them."""
        found = (self.block >= 0) & ((self.block < begin) | (self.block >= end))
        others = np.flatnonzero((self.places < begin) | (self.places >= end))
        real = np.arange(self.rows.shape[1])[None, :] < self.counts[others][:, None]
        touched = np.unique(self.rows[others][real])
        found[touched[self.block[touched] >= 0]] = True
        for name in self.skeleton.together:  # one variable for ops of several blocks
            found[self.skeleton.ops[name]] = True
        return found

    def _users(self, value: str) -> list[int]:
        graph, block_of = self.skeleton.graph, self.blocks.block_of
        return sorted({block_of[user.name] for user, _ in graph.users[value] if user.name in self.skeleton.ops})

    def _block(self, table: Table, entry: FactorEntry) -> int:
        """What is made for a reader is in the reader's block, what is made for several in the maker's."""
        block_of, graph = self.blocks.block_of, self.skeleton.graph
        if isinstance(table, OpTable):
            return block_of[entry.name]
        return block_of[entry.reader or graph.producer[entry.name].name]

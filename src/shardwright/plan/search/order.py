"""In which order variables are eliminated. The order decides how large tables get, never what is found.

Two conventions make equal layers meet as equal sub-problems:

    inside     `split_variables` keeps, on each border between layers, the variables of one side. What is left of a
               layer then touches its own borders only, and is eliminated first, in an order that depends on the
               layer's structure alone (`Borders.cheapest`: the smallest table next).
    between    `Borders.in_rounds` eliminates what was kept. A round takes variables that do not touch each other, so
               along a chain every second border goes, and all borders of a round are one and the same step. Where
               that would need large tables, it eats the chain from its ends instead.

Variables that many layers share (hubs) are borders as well, and go last because their tables are large.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from itertools import permutations

import numpy as np
from numpy.typing import NDArray

from .problem import Ints, Problem

HUB = 4  # a variable that touches more layers than this is shared by many
SMALL = 2**16  # cells: steps up to this size are all the same to a round

Scope = tuple[int, ...]


def split_variables(problem: Problem) -> NDArray[np.bool_]:
    """Which variables lie inside of a layer: all that they touch is in their layer, in a border, or a hub."""
    _, blocks = np.unique(np.array(problem.blocks, dtype=np.intp), return_inverse=True)
    first, second = _pairs(problem)
    hub = _layers_touched(first, blocks[second], len(problem.sizes)) > HUB
    near = ~hub[first] & ~hub[second]
    sides = []
    for crossing in (near & (blocks[first] < blocks[second]), near & (blocks[first] > blocks[second])):
        keep = np.zeros(len(blocks), dtype=bool)
        keep[first[crossing]] = True
        width = np.bincount(blocks[keep], weights=np.log(np.array(problem.sizes)[keep]), minlength=1)
        sides.append((float(width.max()), keep))
    keep = min(sides, key=lambda side: side[0])[1]
    return ~(keep | hub)


def _pairs(problem: Problem) -> tuple[Ints, Ints]:
    """All pairs of variables that share a factor, both ways around."""
    first, second = [np.zeros(0, dtype=np.intp)], [np.zeros(0, dtype=np.intp)]
    for group in problem.groups:
        for i, j in permutations(range(group.rows.shape[1]), 2):
            first.append(group.rows[:, i])
            second.append(group.rows[:, j])
    return np.concatenate(first), np.concatenate(second)


def _layers_touched(variables: Ints, blocks: Ints, count: int) -> Ints:
    """For each variable the number of different layers among its neighbours."""
    many = int(blocks.max(initial=0)) + 1
    touched = np.unique(variables * many + blocks) // many
    return np.bincount(touched, minlength=count)


class Borders:
    """The scopes of the tables that are left while variables are eliminated one by one, and what to eliminate next."""

    def __init__(self, scopes: Sequence[Scope], sizes: Sequence[int], free: Sequence[int]) -> None:
        self.sizes = sizes
        self.scopes = dict(enumerate(scopes))
        self.tables: dict[int, set[int]] = {v: set() for v in free}
        for number, scope in self.scopes.items():
            for v in scope:
                if v in self.tables:
                    self.tables[v].add(number)
        self.around: dict[int, set[int]] = {}
        self.heap: list[tuple[int, int]] = []
        self.small: set[int] = set()
        for v in self.tables:
            self._measure(v)

    def cheapest(self) -> Iterator[int]:
        """Always the variable that leaves the smallest table."""
        while self.tables:
            yield self._pop()

    def in_rounds(self) -> Iterator[int]:
        """Rounds of variables that don't touch each other while steps are small, then the cheapest."""
        while self.tables:
            if not self.small:
                yield self._pop()
                continue
            few = min(len(self.around[v]) for v in self.small) + 1
            blocked: set[int] = set()
            for v in sorted(self.small, key=lambda v: (len(self.around[v]), v)):
                if len(self.around[v]) <= few and v not in blocked:
                    blocked |= self.around[v]
                    yield v

    def eliminate(self, v: int, table: int) -> tuple[list[int], Scope]:
        """Take v out: the numbers of the tables that it stands in, and the scope of the new one, `table`."""
        scope = tuple(sorted(self.around.pop(v)))
        gone = sorted(self.tables.pop(v))
        self.small.discard(v)
        for number in gone:
            for u in self.scopes.pop(number):
                if u in self.tables:
                    self.tables[u].discard(number)
        self.scopes[table] = scope
        for u in scope:
            if u in self.tables:
                self.tables[u].add(table)
        for u in scope:
            if u in self.tables:
                self._measure(u)
        return gone, scope

    def _pop(self) -> int:
        while True:
            cells, v = heapq.heappop(self.heap)
            if v in self.tables and cells == self._cells(v) // self.sizes[v]:
                return v

    def _cells(self, v: int) -> int:
        return self.sizes[v] * math.prod(self.sizes[u] for u in self.around[v])

    def _measure(self, v: int) -> None:
        self.around[v] = {u for number in self.tables[v] for u in self.scopes[number]} - {v}
        cells = self._cells(v)
        heapq.heappush(self.heap, (cells // self.sizes[v], v))
        if cells <= SMALL:
            self.small.add(v)
        else:
            self.small.discard(v)

"""The stages of a pipeline solved by themselves, exactly, each within its own memory.

A stage of a trial is a mix of solutions. Here its ops, parameters and layers are variables again. Everything outside
is fixed to a solution of the whole graph, and so are the values that cross, so that both sides see them alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from ...cost.resources import phases, row
from ..search import CostFactor, Problem, solve
from ..tables import Tables
from .blocks import BlockOfEntries
from .front import StageFront, StageSolution
from .stage import StageCost, stage_of

AIM = 0.01
"""The relative gap at which a stage is solved well enough."""


@dataclass(frozen=True, eq=False, kw_only=True)
class SolvedStage:
    """A solved stage: its cost, and the states of all variables (only those of its own blocks count)."""

    stage: StageCost
    solution: StageSolution
    begin: int
    end: int


class Refiner:
    """Solves runs of blocks. Identical runs are solved once."""

    def __init__(self, where: dict[bool, BlockOfEntries], stop: Callable[[], bool]) -> None:
        self.where, self.stop = where, stop
        self._anchors: dict[int, StageSolution | None] = {}
        self._known: dict[tuple[object, ...], tuple[int, ...] | None] = {}
        self._problems: dict[tuple[object, ...], Problem] = {}  # whatever the room

    def solve(self, front: StageFront, begin: int, end: int, flight: float, room: float) -> SolvedStage | None:
        """The fastest solution for a run of blocks within `room` bytes; None if none was found."""
        assert front.fastest is not None
        plain = front.fastest.between(begin, end)
        stage = stage_of(plain, front.overlap)
        if stage.memory(flight) <= room:
            return SolvedStage(stage=stage, solution=front.fastest, begin=begin, end=end)
        return self._within(front, front.recomputing or front.plain, begin, end, flight, room)

    def _within(
        self, front: StageFront, tables: Tables, begin: int, end: int, flight: float, room: float
    ) -> SolvedStage | None:
        if id(tables) not in self._anchors:
            self._anchors[id(tables)] = front._solve(tables, front.time)
        anchor = self._anchors[id(tables)]
        if anchor is None:
            return None
        where = self.where[bool(tables.skeleton.layers)]
        entries = where.entries(begin, end)
        fixed = where.outside(begin, end)
        padded = where.variables[entries]
        real = np.arange(padded.shape[1])[None, :] < where.counts[entries][:, None]
        variables = np.unique(padded[real])
        at_anchor = np.where(fixed[variables], anchor.states[variables], -1)
        relative = np.where(real, np.searchsorted(variables, padded), -1)
        alike = (where.tables[entries].tobytes(), relative.tobytes(), at_anchor.tobytes())
        same = (id(tables), alike, flight)
        key = (*same, round(room / 2**20))
        if key not in self._known:
            if same not in self._problems:
                problem = self._problem(front, tables, where, entries, variables, fixed, anchor, flight)
                self._problems[same] = problem
            within = self._problems[same].within(room)
            self._known[key] = solve(within, stop=self.stop, aim=AIM, exact=False).states
        solved = self._known[key]
        if solved is None:
            return None
        states = anchor.states.copy()
        free = ~fixed[variables]
        states[variables[free]] = np.array(solved)[free]
        solution = front._solution(tables, states)
        stage = stage_of(solution.between(begin, end), front.overlap)
        return SolvedStage(stage=stage, solution=solution, begin=begin, end=end)

    def _problem(
        self, front: StageFront, tables: Tables, where: BlockOfEntries, entries: np.ndarray, variables: np.ndarray,
        fixed: np.ndarray, anchor: StageSolution, flight: float,
    ) -> Problem:  # fmt: skip
        number = {int(variable): at for at, variable in enumerate(variables)}
        sliced: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

        def factor(entry: int) -> CostFactor:
            own = tuple(int(v) for v in where.variables[entry, : where.counts[entry]])
            at = tuple(int(anchor.states[v]) if fixed[v] else -1 for v in own)
            key = (int(where.tables[entry]), at)
            if key not in sliced:
                table = tables.arrays[key[0]]
                for dim, state in enumerate(at):
                    table = table if state < 0 else table.take([state], axis=dim)
                sliced[key] = table
            return CostFactor(tuple(number[v] for v in own), sliced[key])

        blocks = tables.blocks
        return Problem(
            sizes=tuple(1 if fixed[v] else tables.sizes[v] for v in variables),
            factors=tuple(factor(int(entry)) for entry in entries),
            blocks=tuple(blocks[v] for v in variables),
            phases=phases(front.overlap, front.microbatches),
            memory=row(stored=1.0, kept=flight),
        )

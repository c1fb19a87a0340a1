"""The fastest plan of a mesh that fits its memory.

Sums see what is stored and what is saved for backward; the rest of a peak, its transient memory, belongs to one plan
and is known once that plan is simulated. So a mesh is solved several times, each time with another number of bytes
taken off the limit (`reserve`), and every solution is simulated:

    first         nothing is reserved, and only what certainly coexists counts: nothing that fits is faster than its
                  bound, and if it fits itself, it is the best plan of the mesh
    then          as much as the last solution needed on top; less where one fits with less, and halfway where
                  nothing is left
    at last       where a single op is large, the same without the choices that make ops as large (`largest`)

What is learned on one mesh (`hints`) only makes the next one faster: none of it reserves memory there.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ..cost.resources import certain_memory, lasting_memory
from ..cost.resources import memory as memory_weights
from ..memory import MemoryPeak
from .context import SearchContext
from .meshes import MeshCandidate
from .search import Solution, solve
from .search_options import SearchOptions
from .tables import Tables

ATTEMPTS = 6
"""How often a mesh is solved with another reserve until it fits. Most do after two or three."""

SHRINKS, SHRINK = 3, 0.6
"""How often ops are limited in size, and to which fraction of the largest one in a solution that did not fit."""

SIZEABLE = 0.05
"""The fraction of the memory that an op has to take for its size to be limited."""

ROUGH = 0.05
"""The gap that is good enough for an attempt that mostly has to reveal the transient memory."""

WORTH = 0.02
"""The fraction of the memory that has to be at stake for a mesh to be solved again."""

LESS = 0.9
"""To which fraction a larger reserve has to bring transient memory that no reserve is enough for."""

OVERSTATED = 0.5
"""The fraction of the memory by which sums may overstate the peak: gradients appear as activations are freed."""


@dataclass(frozen=True, kw_only=True)
class MeshResult:
    """One mesh that the search tried.

    bound     nothing on it takes less, whatever the memory
    within    nothing on it that fits takes less
    """

    candidate: MeshCandidate
    bound: float
    within: float
    plain: Tables
    again: Tables | None = None  # with activation checkpointing allowed
    tables: Tables  # those of the solution
    solution: Solution | None = None
    memory: MemoryPeak | None = None  # of the solution, by memory simulation

    @property
    def time(self) -> float:
        """Seconds of the best step on this mesh; infinity if there is none, or if its bound pruned it."""
        return self.solution.time if self.solution is not None and self.solution.states is not None else math.inf

    @property
    def needs(self) -> float:
        """Peak bytes of its solution, by memory simulation."""
        assert self.memory is not None
        return self.memory.peak

    @property
    def transient(self) -> float:
        """Transient memory of its solution in bytes, plus 1 %; negative where sums overstate the peak."""
        assert self.solution is not None
        return (self.needs - self.solution.memory) * 1.01

    @property
    def beside_lasting(self) -> float:
        """The same beside sums that count only what lasts."""
        assert self.solution is not None and self.solution.resources is not None
        return (self.needs - float(self.solution.resources @ lasting_memory())) * 1.01


@dataclass(slots=True)
class ReserveRange:
    """The reserves still to be tried: more than `low`, with which nothing fits, and less than `high`."""

    low: float
    high: float
    least: float  # bytes that are worth another attempt

    def towards(self, wanted: float) -> float | None:
        """The next reserve: the wanted one if it is inside, else the middle; None where too little is left."""
        if self.high - self.low < self.least:
            return None
        return wanted if self.low < wanted < self.high else (self.low + self.high) / 2


class MeshFitter:
    """Fits meshes one after the other; `best` is the fastest plan so far, `leanest` that of the least peak."""

    def __init__(self, context: SearchContext, options: SearchOptions, late: Callable[[], bool]) -> None:
        self.context, self.options, self.late = context, options, late
        self.limit = context.limits.memory
        self.weights = memory_weights()
        self.hints: dict[tuple[bool, bool], np.ndarray] = {}
        self.peaks: dict[tuple[Tables, tuple[int, ...]], MemoryPeak] = {}
        self.best: MeshResult | None = None
        self.leanest: MeshResult | None = None

    @property
    def upper(self) -> float:
        """The time that another mesh must beat to be tried."""
        best = self.best.time * (1 - self.options.slack) if self.best is not None else math.inf
        return min(best, self.options.upper)

    def offer(self, result: MeshResult | None) -> None:
        """Remember a plan that fits if it is the best."""
        if result is not None and result.time < (self.best.time if self.best is not None else math.inf):
            self.best = result

    def fit(self, result: MeshResult) -> MeshResult:
        """Solve a mesh until its memory simulation fits, too."""
        first = self._closely(result, None, math.inf, math.inf)  # as far as what certainly coexists lets it fit
        solution = first.solution
        assert solution is not None
        first = replace(first, within=max(result.bound, solution.bound))
        fitting = first if self._fits(first) else self._fit_smaller(first)
        self.offer(fitting)
        return fitting or replace(first, solution=replace(solution, states=None))

    def _closely(self, result: MeshResult, reserve: float | None, largest: float, upper: float) -> MeshResult:
        """A mesh solved roughly, which mostly has to reveal the transient memory, and closely where that fits."""
        rough = self._solve(result, reserve, largest=largest, upper=upper, rough=True)
        slow = rough.time >= min(upper, self.upper)  # and was not simulated
        close = rough.solution is None or rough.time == math.inf or rough.solution.gap <= self.options.aim
        if close or not (slow or self._fits(rough)):
            return rough
        exact = self._solve(rough, reserve, largest=largest, upper=upper)
        return exact if slow or (self._fits(exact) and exact.time < rough.time) else rough

    def _fits(self, result: MeshResult) -> bool:
        return result.memory is not None and result.needs <= self.limit

    def _fit_smaller(self, first: MeshResult) -> MeshResult | None:
        """The fastest plan found that fits, with ops of any size and of less and less."""
        result, largest, best = first, math.inf, None
        for _ in range(1 + SHRINKS):
            if result.time >= self._upper(best):
                break
            if self._fits(result):
                return result
            largest = min(largest, self._largest_op(result))
            best = self._fit_reserve(result, best, largest) or best
            largest *= SHRINK
            close = best is not None and best.time <= first.within * (1 + self.options.slack)
            if close or largest < SIZEABLE * self.limit or self.late():
                break
            result = self._closely(result, None, largest, math.inf)
        if best is None and self.best is None and self._upper(None) > first.time:
            return self._fit_reserve(first, None, math.inf)  # with larger ops, which lean plans may have too
        return best

    def _fit_reserve(self, result: MeshResult, best: MeshResult | None, largest: float) -> MeshResult | None:
        """The fastest plan found that fits with some reserve and beats the best; `result` is one that does not fit."""
        span = ReserveRange(-OVERSTATED * self.limit, self.limit, WORTH * self.limit)
        reserve, fitting, transient, attempts = span.towards(result.transient), None, result.transient, 0
        while reserve is not None and attempts < ATTEMPTS:
            tried = self._closely(result, reserve, largest, self._upper(fitting or best))
            wanted = -math.inf
            if tried.time == math.inf:  # nothing, which more in reserve does not change
                room = self._room_for_least(tried)
                if room < reserve:
                    wanted = room - span.least / 2
                span.high = min(reserve, room)
            elif tried.time >= self._upper(fitting or best):
                span.high = reserve
            elif self._fits(tried):
                fitting, span.high, wanted = tried, reserve, tried.transient
                if wanted > reserve - span.least:
                    break
            else:
                span.low, wanted = reserve, tried.transient
                known = self._upper(fitting or best) < math.inf
                if wanted >= span.high - known * span.least and (known or wanted > LESS * transient):
                    break  # no reserve is enough, or none that leaves a faster plan than is known
                transient = wanted
            attempts += tried.memory is not None  # that nothing fits is soon known
            reserve = span.towards(wanted)
        return fitting

    def _room_for_least(self, tried: MeshResult) -> float:
        """What can be reserved for a solution of the least sums, where that is known."""
        assert tried.solution is not None
        least = tried.solution.least_memory
        return self.limit - least if math.isfinite(least) else math.inf

    def _upper(self, best: MeshResult | None) -> float:
        return min(self.upper, best.time if best is not None else math.inf)

    def _largest_op(self, result: MeshResult) -> float:
        assert result.solution is not None and result.solution.states is not None
        return result.tables.largest_op(result.solution.states)

    def _solve(
        self, result: MeshResult, reserve: float | None = None, *,
        largest: float = math.inf, upper: float = math.inf, rough: bool = False,
    ) -> MeshResult:  # fmt: skip
        """A mesh solved and its solution simulated, unless it is too slow to matter.

        Without a reserve only what certainly coexists counts.

        Activation checkpointing is tried only where memory is short: it never makes a step faster.
        """
        upper = min(upper, self.upper)
        ask = _Question(reserve, largest, upper, rough)
        solution = None
        if (True, reserve is None) not in self.hints:  # else another mesh was short of memory, and this one will be
            solution = self._answer(result.plain, ask)
            result = replace(result, tables=result.plain, solution=solution)
            short = solution.states is None or solution.time > result.bound * (1 + self.options.aim)
            if not short or not self.context.may_recompute:
                return self._simulated(result, upper)
            ask = ask._replace(upper=min(ask.upper, solution.time))
        tables = result.again or self.context.tables(self.context.recomputing, result.candidate, like=result.plain)
        if tables is None:
            return self._simulated(result, upper)
        again = self._answer(tables, ask, recompute=True)
        if solution is not None and solution.states is not None and not again.time < solution.time:
            lower = min(solution.bound, again.bound)
            return self._simulated(replace(result, again=tables, solution=replace(solution, bound=lower)), upper)
        return self._simulated(replace(result, tables=tables, again=tables, solution=again), upper)

    def _answer(self, tables: Tables, ask: _Question, *, recompute: bool = False) -> Solution:
        key = (recompute, ask.reserve is None)
        aim = max(ROUGH, self.options.aim) if ask.rough else self.options.aim
        if ask.reserve is None:
            problem = tables.problem(self.limit, weights=certain_memory(), largest=ask.largest)
        else:
            problem = tables.problem(self.limit - ask.reserve, weights=self.weights, largest=ask.largest)
        hint = self.hints.get(key)
        solution = solve(problem, upper=ask.upper, stop=self.late, aim=aim, hint=hint, exact=not ask.rough)
        if solution.multipliers is not None:
            self.hints[key] = solution.multipliers
        if solution.resources is None:
            return solution
        return replace(solution, memory=float(solution.resources @ self.weights))

    def _simulated(self, result: MeshResult, upper: float) -> MeshResult:
        solution, tables = result.solution, result.tables
        if solution is None or solution.states is None or solution.time >= upper:
            return replace(result, memory=None)
        key = tables, solution.states
        if key not in self.peaks:
            choices, storage = tables.choices(solution.states), tables.storage(solution.states)
            self.peaks[key] = tables.peak(choices, storage, tables.recompute(solution.states))
        result = replace(result, memory=self.peaks[key])
        if self.leanest is None or result.needs < self.leanest.needs:
            self.leanest = result
        return result


class _Question(NamedTuple):
    """What a mesh is solved for."""

    reserve: float | None
    largest: float
    upper: float
    rough: bool

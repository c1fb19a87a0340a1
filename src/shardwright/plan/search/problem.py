"""The planner's search as an abstract problem: variables, factors, resources. It knows nothing of models.

    states      x = (x_1, ..., x_n), x_v one of sizes[v] states
    resources   r(x) = sum over factors f of table_f[x on the variables of f]        a vector of K numbers
    time        time(r) = sum over phases of the max over the phase's forms of w . r      Problem.time
    memory      memory(r) = memory . r, at most limit                                 Problem.memory_of, fits

A form is what one resource of the machine is busy with (arithmetic, a link); what overlaps is a max, what follows
is a sum. An infinite entry in resource 0 of a table forbids that combination of states.

Equal layers share their tables: the same array object, not an equal one. `Problem.groups` gathers the factors of
each table, so that everything over all factors is a few numpy calls.
"""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass, field
from functools import cached_property
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from ...errors import PlanError, raise_all

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

MOST_VARIABLES = 4  # of a factor
ROUNDING = 1e-9  # relative: what two ways to add up the same numbers may differ by


@dataclass(frozen=True, eq=False)
class CostFactor:
    """What some variables cost together: a table of their states, of shape (*sizes, K)."""

    variables: tuple[int, ...]
    table: Floats


@dataclass(frozen=True, eq=False)
class FactorGroup:
    """All factors that share one table: a row of variables for each."""

    table: Floats
    rows: Ints  # [factor, place in the table]

    def look_up(self, states: Ints) -> Floats:
        """The resources of each factor at these states of all variables: [factor, K]."""
        used: Floats = self.table[tuple(states[self.rows].T)]
        return used


@dataclass(frozen=True, eq=False)
class Point:
    """States of all variables, and what they cost."""

    states: Ints
    resources: Floats
    time: float
    memory: float


@dataclass(frozen=True, eq=False)
class Problem:
    sizes: tuple[int, ...]  # how many states each variable has
    factors: tuple[CostFactor, ...]
    blocks: tuple[int, ...]  # the layer of each variable; layers follow each other
    phases: tuple[tuple[Floats, ...], ...]
    memory: Floats
    limit: float = math.inf
    first: Problem | None = field(default=None, init=False, repr=False)  # the same with another limit
    like: Problem | None = field(default=None, repr=False)  # the same but for tables, and so for sizes

    def __post_init__(self) -> None:
        raise_all(PlanError, "the search problem is malformed:", self._faults_of_shape() or self._faults_of_tables())

    def within(self, limit: float, memory: Floats | None = None) -> Problem:
        """The same with another limit, and maybe another sum that it limits: what does not depend on it is reused."""
        limited = copy(self)
        object.__setattr__(limited, "limit", limit)
        if memory is not None:
            object.__setattr__(limited, "memory", memory)
        object.__setattr__(limited, "first", self.first or self)
        return limited

    @cached_property
    def groups(self) -> tuple[FactorGroup, ...]:
        if self.like is not None:
            distinct = {id(factor.table): factor.table for factor in self.factors}.values()
            return tuple(FactorGroup(table, old.rows) for table, old in zip(distinct, self.like.groups, strict=True))
        tables: dict[int, Floats] = {}
        rows: dict[int, list[tuple[int, ...]]] = {}
        for factor in self.factors:
            tables[id(factor.table)] = factor.table
            rows.setdefault(id(factor.table), []).append(factor.variables)
        return tuple(FactorGroup(tables[key], np.array(rows[key], dtype=np.intp)) for key in tables)

    def time(self, resources: Floats) -> float:
        """The time of one vector of resources."""
        return float(self.times(resources[None])[0])

    def times(self, resources: Floats) -> Floats:
        """The time of each row of resources."""
        total = np.zeros(len(resources))
        for forms in self.phases:
            total += (resources @ np.array(forms).T).max(axis=1)
        return total

    def memory_of(self, resources: Floats) -> float:
        return float(resources @ self.memory)

    def fits(self, memory: Floats | float) -> NDArray[np.bool_]:
        """Whether memory is within the limit, up to rounding."""
        slack = ROUNDING * abs(self.limit) if math.isfinite(self.limit) else 0.0
        return np.asarray(memory) <= self.limit + slack

    def point(self, states: Ints) -> Point:
        resources = np.zeros(len(self.memory))
        for group in self.groups:
            resources += group.look_up(states).sum(axis=0)
        return Point(states, resources, self.time(resources), self.memory_of(resources))

    def _faults_of_shape(self) -> list[str]:
        kinds = len(self.memory)
        faults = [f"variable {v} has no states" for v, size in enumerate(self.sizes) if size < 1]
        if len(self.blocks) != len(self.sizes):
            faults.append(f"{len(self.sizes)} variables, but blocks for {len(self.blocks)}")
        if not self.phases or not all(self.phases):
            faults.append("time needs a phase, and each phase a form")
        for form in (form for forms in self.phases for form in forms):
            if form.shape != (kinds,):
                faults.append(f"a form has shape {form.shape}, but memory counts {kinds} resources")
        for factor in self.factors if self.like is None else ():  # whose factors were looked at
            if not 1 <= len(factor.variables) <= MOST_VARIABLES:
                faults.append(f"a factor of {len(factor.variables)} variables; from 1 to {MOST_VARIABLES} are possible")
            elif factor.table.ndim != len(factor.variables) + 1 or factor.table.shape[-1] != kinds:
                faults.append(f"a table of shape {factor.table.shape} over {factor.variables} and {kinds} resources")
        return faults

    def _faults_of_tables(self) -> list[str]:
        faults = []
        sizes = np.array(self.sizes, dtype=np.intp)
        for group in self.groups:
            table, rows = group.table, group.rows
            if rows.min() < 0 or rows.max() >= len(sizes):
                faults.append(f"a factor names a variable beyond the {len(sizes)} there are")
            elif (sizes[rows] != table.shape[:-1]).any():
                faults.append(f"a table of shape {table.shape} stands over variables of other sizes")
            elif any((rows[:, i] == rows[:, j]).any() for i, j in combinations(range(rows.shape[1]), 2)):
                faults.append("a factor names a variable twice")
            if np.isnan(table).any() or (table == -np.inf).any() or (table[..., 1:] == np.inf).any():
                faults.append("a table has a nan, a -inf, or an inf in another resource than the first")
        return faults


@dataclass(frozen=True)
class Solution:
    """The best states that were found, and how good they are known to be."""

    states: tuple[int, ...] | None  # None: nothing fits, or nothing is as fast as was asked (then the bound is finite)
    resources: Floats | None
    time: float
    memory: float
    bound: float  # nothing within the limit is faster than this
    exact: bool  # proved to be the best
    least_memory: float  # nothing at all takes less memory than this
    stopped: bool  # was asked to stop: the best so far
    multipliers: Floats | None = None  # those of the bound

    @property
    def gap(self) -> float:
        """How much slower this is than the bound, as a part of the bound."""
        if self.time <= self.bound:
            return 0.0
        return self.time / self.bound - 1 if self.bound > 0 else math.inf

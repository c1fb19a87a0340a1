"""What a plan would cost if some ops were split otherwise.

    alone     everything else stays: other ops, the storage of parameters, what is recomputed
    follow    the other ops and the storage are free: the best plan on the same mesh with these ops split so

Both use the tables of the search, with the queried ops fixed at one state after another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..cost.reshard_tables import ReshardTables
from ..errors import PlanError
from ..rules import Analysis
from .folding import star
from .op_kinds import OpKinds
from .plan import Plan
from .problem_structure import ProblemStructure
from .search import CostFactor, Problem, solve
from .spaces import ChoiceSpaces, FixedChoices
from .storage_options import StoragePricing
from .tables import Tables

AIM = 0.0005
"""How near to the best the plans are in which other ops follow."""

Choice = Mapping[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """One way to split the asked ops, and what a step costs then: seconds, and bytes at the worst moment."""

    choice: Choice
    chosen: bool
    seconds: float
    memory: float
    follow: float  # infinity if nothing was found that fits


@dataclass(frozen=True, kw_only=True)
class WhatIfQuery:
    """A plan, what it is for, and the ops that are asked about."""

    analysis: Analysis
    cluster: Cluster
    training: TrainingSetup
    plan: Plan
    ops: tuple[str, ...]
    replica_axes: tuple[str, ...] = ()
    limit: float | None = None  # bytes that a device may use

    @property
    def entry(self) -> str:
        return self.analysis.graph.entry

    @property
    def recompute(self) -> tuple[str, ...]:
        return self.plan.entries[self.entry][0].recompute


def find_ops(analysis: Analysis, plan: Plan, name: str) -> tuple[str, ...]:
    """The ops that a name stands for, which may have stars; refused if the plan splits them differently."""
    live = [op.name for op in analysis.live]
    wanted = " ".join(name.split())
    ops = tuple(op for op in live if op == wanted or ("*" in wanted and star(op) == wanted))
    if not ops:
        part = wanted.split(" / ")[0].strip("/ ")
        near = list(dict.fromkeys(star(op) for op in live if star(part) in star(op)))[:6]
        hint = f"; there are {', '.join(near)}" if near else "; an op is named as in the plan file: module path / kind"
        raise PlanError(f"no op is named {name!r}, or its value is a constant{hint}")
    choices = plan.choices(analysis.graph.entry)
    ways = {tuple(sorted(choices.get(op, {}).items())): op for op in ops}
    if len(ways) > 1:
        raise PlanError(f"the ops of {name!r} are split in {len(ways)} ways; ask for one: {', '.join(ways.values())}")
    return ops


def alternatives(query: WhatIfQuery, most: int | None = None) -> tuple[Alternative, ...]:
    """Every way to split the asked ops, the fastest alone first; `most` of them, the chosen one in any case."""
    fixed, free = _tables(query, follow=False), _tables(query, follow=True)
    layouts, mesh = query.analysis.signatures[query.ops[0]].layouts, query.plan.mesh
    picked = layouts(query.plan.choices(query.entry).get(query.ops[0], {}), mesh)
    problem = fixed.problem()
    alone = [(choice, solve(_with_fixed(problem, states))) for choice, states in _ways(query, fixed)]
    alone.sort(key=lambda item: (item[1].time, layouts(item[0], mesh) != picked))
    chosen = next(at for at, (choice, _) in enumerate(alone) if layouts(choice, mesh) == picked)
    reserve = max(0.0, _peak(query, fixed, alone[chosen][0]) - alone[chosen][1].memory)
    limit = query.training.room(query.cluster.memory) if query.limit is None else query.limit
    problem, hint = free.problem(limit - reserve), None
    results: list[Alternative] = []
    for at, (choice, solution) in enumerate(alone):
        if most is not None and at >= most and at != chosen:
            continue
        states = _same(query, free, choice)
        follow = solve(_with_fixed(problem, states), aim=AIM, hint=hint) if states else None
        hint = follow.multipliers if follow is not None and follow.multipliers is not None else hint
        results.append(
            Alternative(
                choice=choice,
                chosen=at == chosen,
                seconds=solution.time,
                memory=_peak(query, fixed, choice) if solution.states is not None else math.inf,
                follow=follow.time if follow is not None else math.inf,
            )
        )
    return tuple(results)


def _tables(query: WhatIfQuery, *, follow: bool) -> Tables:
    """The tables with the asked ops free, and the others too if they follow."""
    analysis, plan = query.analysis, query.plan
    choices = plan.choices(query.entry)
    known: dict[str, object] = {} if follow else {**choices, **plan.storage}
    chunked = plan.entries[query.entry][0].chunked_loss
    kinds = OpKinds(analysis, query.training, {**known, **dict.fromkeys(query.ops, "asked")}, chunked)
    skeleton = ProblemStructure(kinds, {path: (frozenset([path]),) for path in query.recompute})
    names = plan.mesh.names
    data = query.replica_axes if not follow else query.replica_axes or names[: len(names) == 3]
    fixed = FixedChoices(None if follow else choices, query.ops)
    spaces = ChoiceSpaces(kinds, ReshardTables(plan.mesh, query.cluster), data=data, fixed=fixed)
    return Tables(skeleton, spaces, StoragePricing(spaces, fixed=None if follow else plan.storage), query.replica_axes)


def _ways(query: WhatIfQuery, tables: Tables) -> Iterator[tuple[Choice, dict[int, int]]]:
    """Every choice that all asked ops have, and the states that it means. What the plan has chosen comes first."""
    kinds = tables.skeleton.kinds.of
    for choice in tables.spaces.of(kinds[query.ops[0]]).choices:
        states = _same(query, tables, choice)
        if states:
            yield choice, states


def _same(query: WhatIfQuery, tables: Tables, choice: Choice) -> dict[int, int]:
    """For the variables of the asked ops the state that lies as this choice does; nothing if one has none."""
    states: dict[int, int] = {}
    known: dict[int, int | None] = {}
    for name in query.ops:
        kind = tables.skeleton.kinds.of[name]
        if kind not in known:
            layouts, mesh = query.analysis.signatures[name].layouts, query.plan.mesh
            wanted, candidates = layouts(choice, mesh), tables.spaces.of(kind).choices
            known[kind] = next(
                (at for at, candidate in enumerate(candidates) if layouts(candidate, mesh) == wanted), None
            )
        state = known[kind]
        if state is None:
            return {}
        states[tables.skeleton.ops[name]] = state
    return states


def _with_fixed(problem: Problem, states: Mapping[int, int]) -> Problem:
    """The problem with some variables fixed at one state."""
    tables: dict[tuple[int, tuple[int, ...]], np.ndarray] = {}

    def fix(factor: CostFactor) -> CostFactor:
        at = tuple(states.get(variable, -1) for variable in factor.variables)
        if max(at) < 0:
            return factor
        key = (id(factor.table), at)
        if key not in tables:
            table = factor.table
            for dim, state in enumerate(at):
                table = table if state < 0 else table.take([state], axis=dim)
            tables[key] = table
        return replace(factor, table=tables[key])

    sizes = tuple(1 if at in states else size for at, size in enumerate(problem.sizes))
    return replace(problem, sizes=sizes, factors=tuple(fix(factor) for factor in problem.factors))


def _peak(query: WhatIfQuery, tables: Tables, choice: Choice) -> float:
    choices = {**query.plan.choices(query.entry), **dict.fromkeys(query.ops, choice)}
    return tables.peak(choices, query.plan.storage, query.recompute).peak

"""The search: the mesh, the split of every op, the storage of every parameter, what is recomputed, all at once.

    for every mesh of the cluster     build the tables (`tables`), and bound them from below (`search.relax`)
    the most promising first          solve it exactly within the memory (`search.solve`)
    until no bound is lower           than the best that was found

A solution comes with a lower bound over all meshes, so that the gap says how much could be left at most. What is left
out of the search is said in the plan's notes: see `spaces` and `meshes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from ..cluster import Cluster
from ..cost import Training, flops, is_product
from ..cost.moves import Moves
from ..cost.resources import memory, phases
from ..errors import PlanError
from ..ir import Graph
from ..layout import Axis, Mesh
from ..rules import Analysis
from .draft import Draft
from .homes import Storing
from .kinds import Kinds
from .meshes import Candidate, candidates
from .plan import Plan
from .recompute import faults_of, layers_of, prefixes
from .search import Problem, Solution, relax, solve
from .skeleton import Skeleton
from .spaces import Spaces
from .tables import Tables

Progress = Callable[[str, float], None]
"""Called with what is being looked at, and the best time so far in seconds (infinity if there is none)."""


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What people ask of the search.

    memory        bytes a device may use; None: what the cluster's devices have, less the margin
    recompute     whether layers may be recomputed
    seconds       how long to search at most
    aim           the relative gap at which a mesh is solved well enough
    data_only     every axis splits the batch
    """

    memory: float | None = None
    recompute: bool = True
    seconds: float = math.inf
    aim: float = 0.001
    data_only: bool = False


@dataclass(frozen=True, kw_only=True)
class Looked:
    """One mesh that was looked at."""

    candidate: Candidate
    bound: float
    tables: Tables
    solution: Solution | None = None
    recompute: bool = False

    @property
    def time(self) -> float:
        """Seconds of the best step that was found on it; infinity if none was, or if it was bounded away."""
        return self.solution.time if self.solution is not None and self.solution.states is not None else math.inf


@dataclass(frozen=True, kw_only=True)
class Found:
    """The best that was found, and what else was looked at."""

    plan: Plan
    best: Looked
    looked: tuple[Looked, ...]
    bound: float
    seconds: float
    stopped: bool = False
    notes: tuple[str, ...] = field(default=())

    @property
    def gap(self) -> float:
        assert self.best.solution is not None
        return max(0.0, self.best.solution.time / self.bound - 1.0) if self.bound > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """For a plan file: the bound, and what else was looked at, the best first."""
        others = sorted(self.looked, key=lambda one: (one.time, one.bound))
        meshes = [
            {"mesh": str(one.candidate), "bound": one.bound, "seconds": one.time if math.isfinite(one.time) else None}
            for one in others
        ]
        return {"bound": self.bound, "gap": self.gap, "stopped": self.stopped, "meshes": meshes}


def search(
    facts: Analysis,
    cluster: Cluster,
    training: Training,
    wishes: Wishes | None = None,
    *,
    size: int | None = None,
    progress: Progress | None = None,
) -> Found:
    """The best plan for a graph on a cluster."""
    wishes = wishes or Wishes()
    began = time.monotonic()
    limit = wishes.memory if wishes.memory is not None else cluster.memory * (1.0 - training.margin)

    def late() -> bool:
        return time.monotonic() - began > wishes.seconds

    kinds = Kinds(facts, training)
    plain = Skeleton(kinds)
    looked: list[Looked] = []
    for candidate in candidates(cluster, size, data_only=wishes.data_only):
        tables = make_tables(plain, cluster, candidate, wishes.data_only)
        bound = relax(_problem(tables, cluster, math.inf))
        looked.append(Looked(candidate=candidate, bound=bound, tables=tables))
        if progress is not None:
            progress(f"bounded {candidate}", math.inf)
        if late():
            break
    again = _Later(lambda: Skeleton(kinds, recomputable(facts.graph)))
    order = sorted(range(len(looked)), key=lambda at: looked[at].bound)
    best: Looked | None = None
    stopped = False
    for at in order:
        upper = best.solution.time if best is not None and best.solution is not None else math.inf
        if looked[at].bound >= upper * (1 - 1e-9):
            break
        if late() and best is not None:
            stopped = True
            break
        looked[at] = _solve(looked[at], again, cluster, wishes, limit, upper, late)
        solution = looked[at].solution
        if solution is not None and solution.states is not None and solution.time < upper:
            best = looked[at]
        if progress is not None:
            progress(f"solved {looked[at].candidate}", best.solution.time if best and best.solution else math.inf)
    if best is None:
        raise _nothing_fits(facts, looked, limit)
    stopped = stopped or bool(best.solution and best.solution.stopped)
    return _found(facts, cluster, best, looked, began, stopped)


def extend(plan: Plan, facts: Analysis, cluster: Cluster, training: Training) -> Plan:
    """A plan with an entry for one more graph of the model: ops that it knows by name do what they did."""
    known = next(iter(plan.entries.values()))[0].choices
    names = plan.mesh.names
    allowed = {
        op.name: {axis: frozenset([known[op.name].get(axis, "")]) for axis in names}
        for op in facts.graph.ops
        if op.name in known
    }
    kinds = Kinds(facts, training, {**allowed, **plan.storage})
    spaces = Spaces(kinds, Moves(plan.mesh, cluster), allowed=allowed)
    tables = Tables(Skeleton(kinds), spaces, Storing(spaces, fixed=plan.storage))
    solution = solve(_problem(tables, cluster, math.inf))
    assert solution.states is not None
    draft = Draft(facts.graph, plan.mesh, facts)
    draft.choices.update({name: dict(choice) for name, choice in tables.choices(solution.states).items()})
    more = draft.finish(plan.policy, plan.cluster, settle=False)
    return replace(
        plan,
        entries={**plan.entries, **more.entries},
        fingerprints={**plan.fingerprints, **more.fingerprints},
        notes=tuple(dict.fromkeys((*plan.notes, *more.notes))),
    )


def make_tables(skeleton: Skeleton, cluster: Cluster, candidate: Candidate, rows: bool = False) -> Tables:
    """The problem of one mesh."""
    spaces = Spaces(skeleton.kinds, Moves(candidate.mesh, cluster), data=candidate.data)
    return Tables(skeleton, spaces, Storing(spaces), candidate.data if rows else ())


def recomputable(graph: Graph) -> dict[str, tuple[frozenset[str], ...]]:
    """The repeated layers of a model, and the ways to recompute each: not, its larger parts, all of it."""
    layers = {layer: dict[str, int]() for layer in layers_of(graph) if not faults_of(graph, layer)}
    for op in graph.ops:
        layer = next((path for path in prefixes(op.module_path) if path in layers), None)
        if layer is not None:
            part = op.module_path[len(layer) + 1 :].split(".")[0]
            layers[layer][part] = layers[layer].get(part, 0) + 1
    found = {}
    for layer, counts in layers.items():
        parts = sorted(name for name, count in counts.items() if name and count >= 3)[:3]
        ways = [frozenset[str](), *(frozenset([f"{layer}.{name}"]) for name in parts)]
        if len(parts) > 1:
            ways.append(frozenset(f"{layer}.{name}" for name in parts))
        found[layer] = (*ways, frozenset([layer]))
    return found


def _problem(tables: Tables, cluster: Cluster, limit: float) -> Problem:
    return Problem(
        sizes=tables.sizes,
        factors=tables.factors,
        blocks=tables.blocks,
        phases=phases(cluster.overlap, tables.training.accumulate),
        memory=memory(),
        limit=limit,
    )


class _Later:
    """Something that is made when it is first asked for."""

    def __init__(self, make: Callable[[], Skeleton]) -> None:
        self._make = make

    @cached_property
    def skeleton(self) -> Skeleton:
        return self._make()


def _solve(
    looked: Looked,
    later: _Later,
    cluster: Cluster,
    wishes: Wishes,
    limit: float,
    upper: float,
    late: Callable[[], bool],
) -> Looked:
    """Solve one mesh. Recomputing is looked at only where memory is short: it never makes a step faster."""
    problem = _problem(looked.tables, cluster, limit)
    solution = solve(problem, upper=upper, stop=late, aim=wishes.aim)
    plain = replace(looked, solution=solution)
    short = solution.states is None or solution.time > looked.bound * (1 + wishes.aim)
    if not (short and wishes.recompute and later.skeleton.layers) or looked.bound >= upper:
        return plain
    tables = make_tables(later.skeleton, cluster, looked.candidate, wishes.data_only)
    upper = min(upper, solution.time) if solution.states is not None else upper
    again = solve(_problem(tables, cluster, limit), upper=upper, stop=late, aim=wishes.aim)
    if again.states is None or (solution.states is not None and again.time >= solution.time):
        lower = min(solution.bound, again.bound)
        return replace(plain, solution=replace(solution, bound=lower, least_memory=again.least_memory))
    return replace(plain, tables=tables, solution=again, recompute=True)


def _found(
    facts: Analysis,
    cluster: Cluster,
    best: Looked,
    looked: Sequence[Looked],
    began: float,
    stopped: bool,
) -> Found:
    assert best.solution is not None and best.solution.states is not None
    bound = min(one.solution.bound if one.solution is not None else one.bound for one in looked)
    bound = min(bound, best.solution.time)
    plan = _plan(facts, cluster, best)
    return Found(
        plan=plan, best=best, looked=tuple(looked), bound=bound, seconds=time.monotonic() - began, stopped=stopped
    )


def _plan(facts: Analysis, cluster: Cluster, best: Looked) -> Plan:
    """The plan of a solution, with axes named for what they do."""
    assert best.solution is not None and best.solution.states is not None
    states, tables = best.solution.states, best.tables
    choices, storage = tables.choices(states), tables.storage(states)
    names = axis_names(facts, best.candidate.mesh, choices)
    mesh = Mesh(axes=tuple(Axis(name=names[axis.name], size=axis.size) for axis in best.candidate.mesh.axes))
    draft = Draft(facts.graph, mesh, facts)
    for op, choice in choices.items():
        draft.choices[op] = {names[axis]: role for axis, role in choice.items()}
    for key, held in storage.items():
        for axis, level in held:
            draft.storage.setdefault(key, {})[names[axis]] = level
    for path in tables.recompute(states):
        draft.recompute(path)
    return draft.finish("auto", str(cluster), settle=False)


def axis_names(facts: Analysis, mesh: Mesh, choices: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """dp for an axis that splits mostly the batch, ep if it splits experts, else tp; numbered if there are several."""
    found: dict[str, str] = {}
    for axis in mesh.axes:
        work = {"dp": 1e-9, "tp": 0.0}
        experts = False
        for name, choice in choices.items():
            picked = choice.get(axis.name)
            signature = facts.signatures[name]
            role = next((role for role in signature.roles if role.name == picked), None)
            if role is None:
                continue
            experts = experts or signature.beside(role.label) is not None
            weight = flops(signature) if is_product(signature) else 1e-6
            work["dp" if role.atom in facts.batch else "tp"] += weight
        kind = "ep" if experts else max(work, key=lambda name: work[name])
        taken = [name for name in found.values() if name.rstrip("23") == kind]
        found[axis.name] = kind if not taken else f"{kind}{len(taken) + 1}"
    return found


def _nothing_fits(facts: Analysis, looked: Sequence[Looked], limit: float) -> PlanError:
    least = min((one.solution.least_memory for one in looked if one.solution is not None), default=math.inf)
    return PlanError(
        f"{facts.graph.name} with a batch of {facts.graph.batch} does not fit: the leanest plan that was found needs "
        f"{least / 2**30:.2f} GiB on a device, and there are {limit / 2**30:.2f} GiB; use more devices, a smaller "
        "batch or a larger memory="
    )


__all__ = ["Found", "Looked", "Wishes", "search"]

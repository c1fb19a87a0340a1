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
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..cost import MemoryPeak, TrainingSetup
from ..cost.reshard_prices import ReshardPrices
from ..errors import PlanError
from ..layout import Axis, Mesh
from ..rules import Analysis
from .builder import PlanBuilder
from .clash import find_clash, format_bytes, with_memory
from .constraints import Constraints
from .context import SearchContext
from .limits import bind
from .meshes import MeshCandidate, axis_names, left_out
from .op_kinds import OpKinds
from .outcomes import mesh_outcomes
from .plan import Plan
from .problem_structure import ProblemStructure
from .search import Solution, relax, solve
from .spaces import ChoiceSpaces
from .storage_options import StoragePricing
from .tables import Tables

ATTEMPTS = 12
"""How often a mesh is solved until it fits. Most do after two or three."""

OVERSTATED = 0.5
"""The part of the memory by which sums may overstate what is there at once: gradients come as activations go."""

ROUGH = 0.05
"""The gap that is good enough for the first attempt, which is only to tell what comes and goes."""

REFILLS, WORTH = 2, 0.02
"""How often a mesh is solved again with less in reserve, and the part of the memory that has to be at stake."""

Progress = Callable[[str, float], None]
"""Called with what is being looked at, and the best time so far in seconds (infinity if there is none)."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """What people ask of the search.

    memory        bytes a device may use; None: what the cluster's devices have, less the margin
    recompute     whether layers may be recomputed
    seconds       how long to search at most
    aim           the relative gap at which a mesh is solved well enough
    slack         what another mesh must be better by, relatively, to be worth a look
    data_only     every axis splits the batch
    pipelines     whether pipelines are looked at too
    microbatches  how many parts a batch has, if that is asked for
    local         each of them is a batch of its own, and the graph that of one
    stop          says when to end the search with the best so far
    constraints   what has to be kept to
    """

    memory: float | None = None
    recompute: bool = True
    seconds: float = math.inf
    aim: float = 0.002
    slack: float = 0.005
    data_only: bool = False
    pipelines: bool = True
    microbatches: int | None = None
    local: bool = False
    stop: Callable[[], bool] | None = None
    constraints: Constraints = field(default_factory=Constraints)


@dataclass(frozen=True, kw_only=True)
class MeshResult:
    """One mesh that was looked at."""

    candidate: MeshCandidate
    bound: float
    plain: Tables
    again: Tables | None = None  # with layers that may be recomputed
    tables: Tables  # those of the solution
    solution: Solution | None = None
    memory: MemoryPeak | None = None  # of the solution, by a walk through its step

    @property
    def time(self) -> float:
        """Seconds of the best step that was found on it; infinity if none was, or if it was bounded away."""
        return self.solution.time if self.solution is not None and self.solution.states is not None else math.inf

    @property
    def needs(self) -> float:
        """Bytes of its solution, as a walk has found them."""
        assert self.memory is not None
        return self.memory.peak

    @property
    def passing(self) -> float:
        """Bytes of its solution that come and go, with a little more; less than 0 where sums overstate what is kept."""
        assert self.solution is not None
        return (self.needs - self.solution.memory) * 1.01


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best that was found, and what else was looked at."""

    plan: Plan
    best: MeshResult
    looked: tuple[MeshResult, ...]
    bound: float
    limit: float
    slack: float
    seconds: float
    stopped: bool = False

    @property
    def gap(self) -> float:
        assert self.best.solution is not None
        return max(0.0, self.best.solution.time / self.bound - 1.0) if self.bound > 0 else 0.0

    def as_json(self) -> dict[str, Any]:
        """For a plan file: the bound, and what else was looked at, the best first."""
        meshes = mesh_outcomes(self.looked, self.best, self.limit, self.slack)
        return {"bound": self.bound, "gap": self.gap, "stopped": self.stopped, "meshes": meshes}


def search(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    options: SearchOptions | None = None,
    *,
    size: int | None = None,
    progress: Progress | None = None,
    like: SearchContext | None = None,
) -> SearchResult:
    """The best plan for a graph on a cluster. Raises NothingFits where there is none.

    `like`: a frame of the same graph, of which what can be is used again.
    """
    told = progress or (lambda what, best: None)
    return _MeshSearch(analysis, cluster, training, options or SearchOptions(), size, told, like).run()


class NothingFits(PlanError):
    """There is no flat plan. Finding out why may take a while, so that is done when somebody reads it."""

    def __init__(self, why: Callable[[], PlanError]) -> None:
        super().__init__()
        self._why = why

    @cached_property
    def _said(self) -> str:
        return str(self._why())

    def __str__(self) -> str:
        return self._said


class _MeshSearch:
    """One search. What it learns on one mesh (`hints`, `reserve`) helps on the next."""

    def __init__(
        self, analysis: Analysis, cluster: Cluster, training: TrainingSetup, options: SearchOptions,
        size: int | None, told: Progress, like: SearchContext | None = None,
    ) -> None:  # fmt: skip
        self.analysis, self.cluster, self.training, self.options, self.progress = (
            analysis,
            cluster,
            training,
            options,
            told,
        )
        self.size, self.began = size, time.monotonic()
        self.constraints = with_memory(options.constraints, options.memory, cluster, training)
        self.frame = self._frame(self.constraints, like)
        self.limit = self.frame.limits.memory
        self.reserve = 0.0  # bytes that come and go, which sums of what is kept do not see
        self.hints: dict[bool, np.ndarray] = {}
        self.best: MeshResult | None = None

    def _frame(self, constraints: Constraints, like: SearchContext | None = None) -> SearchContext:
        options, limits = self.options, bind(constraints, self.analysis)
        return SearchContext(
            self.analysis, self.cluster, self.training, limits,
            size=self.size, rows=options.data_only, recompute=options.recompute, like=like,
        )  # fmt: skip

    def late(self) -> bool:
        told = self.options.stop is not None and self.options.stop()
        return told or time.monotonic() - self.began > self.options.seconds

    def run(self) -> SearchResult:
        looked: list[MeshResult] = []
        stopped = False
        for candidate in self.frame.candidates():
            tables = self.frame.tables(self.frame.plain, candidate)
            bound = relax(tables.problem()) if tables is not None else math.inf
            if tables is not None and bound < math.inf:
                looked.append(MeshResult(candidate=candidate, bound=bound, plain=tables, tables=tables))
            self.progress(f"bounded {candidate}", math.inf)
            if self.late() and looked:
                stopped = True
                break
        order = sorted(range(len(looked)), key=lambda at: looked[at].bound)
        for at in order:
            if looked[at].bound >= self.upper:
                break
            if self.late() and self.best is not None:
                stopped = True
                break
            looked[at] = self._fit(looked[at])
            self.progress(f"solved {looked[at].candidate}", self.best.time if self.best is not None else math.inf)
        if self.best is None:
            self._fit_beyond(looked, order)
        if self.best is None:
            raise NothingFits(lambda: self._nothing_fits(looked))
        return self._found(self.best, looked, stopped, left_out(self.cluster, self.size))

    @property
    def upper(self) -> float:
        """What another mesh must stay below to be worth a look."""
        return self.best.time * (1 - self.options.slack) if self.best is not None else math.inf

    def _fit(self, looked: MeshResult, attempts: int = ATTEMPTS) -> MeshResult:
        """Solve a mesh so that a walk through the step, too, says that it fits; remember it if it is the best."""
        rough = self.best is None and self.reserve <= 0.0  # any plan tells what comes and goes
        fitting: MeshResult | None = None  # a rough plan that fits, for which a better one may not be found
        for _ in range(attempts):
            looked = self._solve(looked, rough)
            solution = looked.solution
            if solution is None or solution.states is None:
                break
            if self.best is not None and looked.time >= self.best.time:
                return looked
            looked = replace(looked, memory=self._memory(looked))
            if looked.needs <= self.limit:
                fitting = looked
                if not rough or solution.gap <= self.options.aim:
                    break
            self.reserve, rough = max(self.reserve, looked.passing), False
        if fitting is not None:
            self.best = fitting
            return self._fill(fitting)
        return replace(looked, solution=replace(solution, states=None)) if solution is not None else looked

    def _fit_beyond(self, looked: list[MeshResult], order: Sequence[int]) -> None:
        """Where no sum is within the limit, look at some beyond it: they overstate what is there at once."""
        known = self.reserve
        for at in order:
            if self.late():
                break
            self.reserve = -OVERSTATED * self.limit
            looked[at] = self._fit(looked[at], attempts=2)
            if self.best is not None:
                return
        self.reserve = known

    def _fill(self, best: MeshResult) -> MeshResult:
        """The same with less in reserve, where the plan needs less than there is.

        Less comes and goes in a leaner plan; and where little does, the sums count what is never there at once.
        """
        known, tried = self.reserve, best
        for _ in range(REFILLS):
            self.reserve = tried.passing
            if known - self.reserve < WORTH * self.limit or best.bound >= self.upper:
                break
            found = self._solve(tried, rough=False)
            if found.solution is None or found.solution.states is None or found.time >= best.time:
                break
            tried = replace(found, memory=self._memory(found))
            if tried.needs <= self.limit:
                best = self.best = tried
                known = self.reserve
        self.reserve = known
        return best

    def _memory(self, looked: MeshResult) -> MemoryPeak:
        assert looked.solution is not None and looked.solution.states is not None
        states, tables = looked.solution.states, looked.tables
        return tables.peak(tables.choices(states), tables.storage(states), tables.recompute(states))

    def _solve(self, looked: MeshResult, rough: bool) -> MeshResult:
        """Recomputing is looked at only where memory is short: it never makes a step faster."""
        limit, upper = self.limit - self.reserve, self.upper
        solution = None
        if True not in self.hints:  # else another mesh was short of memory, and this one will be
            solution = self._solved(looked.plain, limit, upper, rough)
            looked = replace(looked, tables=looked.plain, solution=solution)
            short = solution.states is None or solution.time > looked.bound * (1 + self.options.aim)
            if not short or not self.frame.may_recompute:
                return looked
            upper = min(upper, solution.time)
        tables = looked.again or self.frame.tables(self.frame.recomputing, looked.candidate, like=looked.plain)
        if tables is None:
            return looked
        again = self._solved(tables, limit, upper, rough, recompute=True)
        if solution is not None and solution.states is not None and not again.time < solution.time:
            lower = min(solution.bound, again.bound)
            return replace(looked, again=tables, solution=replace(solution, bound=lower))
        return replace(looked, tables=tables, again=tables, solution=again)

    def _solved(self, tables: Tables, limit: float, upper: float, rough: bool, *, recompute: bool = False) -> Solution:
        hint, aim = self.hints.get(recompute), max(ROUGH, self.options.aim) if rough else self.options.aim
        found = solve(tables.problem(limit), upper=upper, stop=self.late, aim=aim, hint=hint, exact=not rough)
        if found.multipliers is not None:
            self.hints[recompute] = found.multipliers
        return found

    def _found(
        self, best: MeshResult, looked: Sequence[MeshResult], stopped: bool, notes: Iterable[str]
    ) -> SearchResult:
        assert best.solution is not None
        bound = min(one.solution.bound if one.solution is not None else one.bound for one in looked)
        said = dict.fromkeys((*notes, *(note for one in looked for note in one.tables.spaces.left_out())))
        plan = _plan(self.analysis, self.cluster, best, self.options.constraints)
        return SearchResult(
            plan=replace(plan, notes=(*plan.notes, *(f"the search: {note}" for note in said))),
            best=best,
            looked=tuple(looked),
            bound=min(bound, best.time),
            limit=self.limit - max(0.0, self.reserve),
            slack=self.options.slack,
            seconds=time.monotonic() - self.began,
            stopped=stopped or best.solution.stopped,
        )

    def _nothing_fits(self, looked: Sequence[MeshResult]) -> PlanError:
        """Say what clashes, or if the model alone does not fit, how far it is from it."""
        reserve = max(0.0, self.reserve)
        found = find_clash(self.constraints, self._frame, reserve)
        if found is not None and any(item in self.options.constraints.items for item in found.items):
            return PlanError(str(found))
        least = min((one.solution.least_memory for one in looked if one.solution is not None), default=math.inf)
        graph = self.analysis.graph
        return PlanError(
            f"{graph.name} with a batch of {graph.batch} does not fit: the leanest plan that was found needs "
            f"{format_bytes(least)} on a device, and there are {format_bytes(self.limit - reserve)}; use more "
            "devices, a smaller batch or a larger memory="
        )


def extend(plan: Plan, analysis: Analysis, cluster: Cluster, training: TrainingSetup) -> Plan:
    """A plan for one more graph of a planned model: ops that it knows by name do what they did."""
    known = next(iter(plan.entries.values()))[0].choices
    names = plan.mesh.names
    allowed = {
        op.name: {axis: frozenset([known[op.name].get(axis, "")]) for axis in names}
        for op in analysis.graph.ops
        if op.name in known
    }
    kinds = OpKinds(analysis, training, {**allowed, **plan.storage})
    spaces = ChoiceSpaces(kinds, ReshardPrices(plan.mesh, cluster), allowed=allowed)
    tables = Tables(ProblemStructure(kinds), spaces, StoragePricing(spaces, fixed=plan.storage))
    solution = solve(tables.problem())
    assert solution.states is not None
    builder = PlanBuilder(analysis.graph, plan.mesh, analysis)
    builder.choices.update({name: dict(choice) for name, choice in tables.choices(solution.states).items()})
    return builder.finish(plan.policy, plan.cluster, settle=False)


def _plan(analysis: Analysis, cluster: Cluster, best: MeshResult, constraints: Constraints) -> Plan:
    """The plan of a solution, with axes named for what they do, unless somebody has named them."""
    assert best.solution is not None and best.solution.states is not None
    states, tables = best.solution.states, best.tables
    choices, storage = tables.choices(states), tables.storage(states)
    names = axis_names(analysis, best.candidate.mesh, choices)
    mesh = Mesh(axes=tuple(Axis(name=names[axis.name], size=axis.size) for axis in best.candidate.mesh.axes))
    builder = PlanBuilder(analysis.graph, mesh, analysis)
    for op, choice in choices.items():
        builder.choices[op] = {names[axis]: role for axis, role in choice.items()}
    for key, held in storage.items():
        for axis, level in held:
            builder.storage.setdefault(key, {})[names[axis]] = level
    for path in tables.recompute(states):
        builder.recompute(path)
    for item in constraints.items:
        builder.note(f"keeps to {item.said}")
    return builder.finish("auto", str(cluster), settle=False)


__all__ = ["MeshResult", "SearchOptions", "SearchResult", "search"]

"""The search: mesh, split of every op, storage of every parameter and activation checkpointing, all at once.

    for every mesh of the cluster     build the tables (`tables`), and bound them from below (`search.relax`)
    the most promising first          solve it exactly within the memory (`search.solve`)
    until no bound is lower           than the best so far: the other meshes are pruned by their bound

A solution comes with a lower bound over all meshes, so that the gap says how much could be left at most. What is left
out of the search is listed in the plan's notes: see `spaces` and `meshes`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..cost.reshard_tables import ReshardTables
from ..errors import PlanError
from ..layout import Axis, Mesh
from ..memory import MemoryPeak
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
from .search_options import SearchOptions
from .spaces import ChoiceSpaces
from .storage_options import StoragePricing
from .tables import Tables

ATTEMPTS = 12
"""How often a mesh is solved until it fits. Most do after two or three."""

OVERSTATED = 0.5
"""The fraction of the memory by which sums may overstate the peak: gradients appear as activations are freed."""

ROUGH = 0.05
"""The gap that is good enough for the first attempt, which only has to reveal the transient memory."""

REFILLS, WORTH = 2, 0.02
"""How often a mesh is solved again with less in reserve, and the fraction of the memory that has to be at stake."""


@dataclass(frozen=True, kw_only=True)
class MeshResult:
    """One mesh that the search tried."""

    candidate: MeshCandidate
    bound: float
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


@dataclass(frozen=True, kw_only=True)
class SearchResult:
    """The best plan, and the other meshes that were tried."""

    plan: Plan
    best: MeshResult
    meshes: tuple[MeshResult, ...]
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
        """For a plan file: the bound, and all meshes that were tried, the best first."""
        meshes = mesh_outcomes(self.meshes, self.best, self.limit, self.slack)
        return {"bound": self.bound, "gap": self.gap, "stopped": self.stopped, "meshes": meshes}


def search(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    options: SearchOptions | None = None,
    *,
    size: int | None = None,
    like: SearchContext | None = None,
) -> SearchResult:
    """The best plan for a graph on a cluster. Raises NothingFits where there is none.

    `like`: the context of an earlier search of the same graph, reused as far as possible.
    """
    return _MeshSearch(analysis, cluster, training, options or SearchOptions(), size, like).run()


class NothingFits(PlanError):
    """There is no plan without a pipeline. Finding out why is slow, so it waits until somebody reads the message."""

    def __init__(self, why: Callable[[], PlanError]) -> None:
        super().__init__()
        self._why = why

    @cached_property
    def _message(self) -> str:
        return str(self._why())

    def __str__(self) -> str:
        return self._message


class _MeshSearch:
    """One search. What it learns on one mesh (`hints`, `reserve`) helps on the next."""

    def __init__(
        self, analysis: Analysis, cluster: Cluster, training: TrainingSetup, options: SearchOptions,
        size: int | None, like: SearchContext | None = None,
    ) -> None:  # fmt: skip
        self.analysis, self.cluster, self.training = analysis, cluster, training
        self.options = options
        self.size, self.began = size, time.monotonic()
        self.constraints = with_memory(options.constraints, options.memory, cluster, training)
        self.frame = self._frame(self.constraints, like)
        self.limit = self.frame.limits.memory
        self.reserve = 0.0  # bytes of transient memory, which sums over choices do not see
        self.hints: dict[bool, np.ndarray] = {}
        self.best: MeshResult | None = None

    def _frame(self, constraints: Constraints, like: SearchContext | None = None) -> SearchContext:
        options, limits = self.options, bind(constraints, self.analysis, self.options.chunked)
        return SearchContext(
            self.analysis, self.cluster, self.training, limits,
            size=self.size, per_replica=options.data_only, recompute=options.recompute, like=like,
        )  # fmt: skip

    def late(self) -> bool:
        stopped = self.options.stop is not None and self.options.stop()
        return stopped or time.monotonic() - self.began > self.options.seconds

    def run(self) -> SearchResult:
        results: list[MeshResult] = []
        stopped = False
        for candidate in self.frame.candidates():
            tables = self.frame.tables(self.frame.plain, candidate)
            bound = relax(tables.problem()) if tables is not None else math.inf
            if tables is not None and bound < math.inf:
                results.append(MeshResult(candidate=candidate, bound=bound, plain=tables, tables=tables))
            self.options.report(f"bounded {candidate}", math.inf)
            if self.late() and results:
                stopped = True
                break
        order = sorted(range(len(results)), key=lambda at: results[at].bound)
        for at in order:
            if results[at].bound >= self.upper:
                break
            if self.late() and self.best is not None:
                stopped = True
                break
            results[at] = self._fit(results[at])
            best = self.best.time if self.best is not None else math.inf
            self.options.report(f"solved {results[at].candidate}", best)
        if self.best is None and self.options.upper == math.inf:
            self._fit_beyond(results, order)
        if self.best is None:
            raise NothingFits(lambda: self._nothing_fits(results))
        return self._result(self.best, results, stopped, left_out(self.cluster, self.size))

    @property
    def upper(self) -> float:
        """The time that another mesh must beat to be tried."""
        best = self.best.time * (1 - self.options.slack) if self.best is not None else math.inf
        return min(best, self.options.upper)

    def _fit(self, result: MeshResult, attempts: int = ATTEMPTS) -> MeshResult:
        """Solve a mesh until its memory simulation fits, too; remember it if it is the best."""
        rough = self.best is None and self.reserve <= 0.0  # any plan reveals the transient memory
        fitting: MeshResult | None = None  # a rough plan that fits, for which a better one may not be found
        for _ in range(attempts):
            result = self._solve(result, rough)
            solution = result.solution
            if solution is None or solution.states is None:
                break
            if self.best is not None and result.time >= self.best.time:
                return result
            result = replace(result, memory=self._memory(result))
            if result.needs <= self.limit:
                fitting = result
                if not rough or solution.gap <= self.options.aim:
                    break
            self.reserve, rough = max(self.reserve, result.transient), False
        if fitting is not None:
            self.best = fitting
            return self._fill(fitting)
        return replace(result, solution=replace(solution, states=None)) if solution is not None else result

    def _fit_beyond(self, results: list[MeshResult], order: Sequence[int]) -> None:
        """Where no sum is within the limit, try some beyond it: sums overstate the peak."""
        known = self.reserve
        for at in order:
            if self.late():
                break
            self.reserve = -OVERSTATED * self.limit
            results[at] = self._fit(results[at], attempts=2)
            if self.best is not None:
                return
        self.reserve = known

    def _fill(self, best: MeshResult) -> MeshResult:
        """The same with less in reserve, where the plan needs less than there is.

        A leaner plan has less transient memory; and where there is little, sums count what never coexists. The last try
        is a sum far beyond the limit, since a plan of another kind may have its peak elsewhere.
        """
        known, tried = self.reserve, best
        for _ in range(REFILLS):
            reserve = tried.transient
            refilled = self._refilled(tried, known, reserve)
            if refilled is None:
                break
            tried = refilled
            if tried.needs <= self.limit:
                best, known = tried, reserve
        beyond = self._refilled(best, known, -OVERSTATED * self.limit)
        if beyond is not None and beyond.needs <= self.limit:
            best = beyond
        self.best, self.reserve = best, known
        return best

    def _refilled(self, tried: MeshResult, known: float, reserve: float) -> MeshResult | None:
        """A faster solution with less in reserve than is known to fit, and its memory; None where there is none."""
        if known - reserve < WORTH * self.limit or tried.bound >= self.upper:
            return None
        self.reserve = reserve
        result = self._solve(tried, rough=False)
        if result.solution is None or result.solution.states is None or self.best is None:
            return None
        return replace(result, memory=self._memory(result)) if result.time < self.best.time else None

    def _memory(self, result: MeshResult) -> MemoryPeak:
        assert result.solution is not None and result.solution.states is not None
        states, tables = result.solution.states, result.tables
        return tables.peak(tables.choices(states), tables.storage(states), tables.recompute(states))

    def _solve(self, result: MeshResult, rough: bool) -> MeshResult:
        """Activation checkpointing is tried only where memory is short: it never makes a step faster."""
        limit, upper = self.limit - self.reserve, self.upper
        solution = None
        if True not in self.hints:  # else another mesh was short of memory, and this one will be
            solution = self._solved(result.plain, limit, upper, rough)
            result = replace(result, tables=result.plain, solution=solution)
            short = solution.states is None or solution.time > result.bound * (1 + self.options.aim)
            if not short or not self.frame.may_recompute:
                return result
            upper = min(upper, solution.time)
        tables = result.again or self.frame.tables(self.frame.recomputing, result.candidate, like=result.plain)
        if tables is None:
            return result
        again = self._solved(tables, limit, upper, rough, recompute=True)
        if solution is not None and solution.states is not None and not again.time < solution.time:
            lower = min(solution.bound, again.bound)
            return replace(result, again=tables, solution=replace(solution, bound=lower))
        return replace(result, tables=tables, again=tables, solution=again)

    def _solved(self, tables: Tables, limit: float, upper: float, rough: bool, *, recompute: bool = False) -> Solution:
        hint, aim = self.hints.get(recompute), max(ROUGH, self.options.aim) if rough else self.options.aim
        solution = solve(tables.problem(limit), upper=upper, stop=self.late, aim=aim, hint=hint, exact=not rough)
        if solution.multipliers is not None:
            self.hints[recompute] = solution.multipliers
        return solution

    def _result(
        self, best: MeshResult, results: Sequence[MeshResult], stopped: bool, notes: Iterable[str]
    ) -> SearchResult:
        assert best.solution is not None
        bound = min(result.solution.bound if result.solution is not None else result.bound for result in results)
        unique_notes = dict.fromkeys(
            (*notes, *(note for result in results for note in result.tables.spaces.left_out()))
        )
        plan = _plan(self.analysis, self.cluster, best, self.options.constraints)
        return SearchResult(
            plan=replace(plan, notes=(*plan.notes, *(f"the search: {note}" for note in unique_notes))),
            best=best,
            meshes=tuple(results),
            bound=min(bound, best.time),
            limit=self.limit - max(0.0, self.reserve),
            slack=self.options.slack,
            seconds=time.monotonic() - self.began,
            stopped=stopped or best.solution.stopped,
        )

    def _nothing_fits(self, results: Sequence[MeshResult]) -> PlanError:
        """Say what clashes, or if the model alone does not fit, how far it is from it."""
        reserve = max(0.0, self.reserve)
        clash = find_clash(self.constraints, self._frame, reserve)
        if clash is not None and any(item in self.options.constraints.items for item in clash.items):
            return PlanError(str(clash))
        least = min(
            (result.solution.least_memory for result in results if result.solution is not None), default=math.inf
        )
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
    spaces = ChoiceSpaces(kinds, ReshardTables(plan.mesh, cluster), allowed=allowed)
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
    builder.storage |= {key: stored.renamed(names).written() for key, stored in storage.items() if stored.axes}
    for path in tables.recompute(states):
        builder.recompute(path)
    joined = tables.joined_losses(states) if tables.skeleton.kinds.chunked else {}
    for name in tables.skeleton.kinds.chunked:
        if name in joined:
            builder.chunk_loss(name, joined[name])
        else:
            builder.note(f"{analysis.graph.by_name[name]} is not chunked: its logits are resharded before it")
    for item in constraints.items:
        builder.note(f"keeps to {item.source}")
    return builder.finish("auto", str(cluster), settle=False)


__all__ = ["MeshResult", "SearchOptions", "SearchResult", "search"]

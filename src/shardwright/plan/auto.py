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

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..cost.reshard_tables import ReshardTables
from ..cost.resources import lasting_memory, memory
from ..errors import PlanError
from ..layout import Axis, Mesh
from ..rules import Analysis
from .binder import bind
from .builder import PlanBuilder
from .clash import find_clash, format_bytes, with_memory
from .constraint_kinds import Constraints
from .context import SearchContext
from .known_splits import known_splits
from .limits import ungathered
from .mesh_fit import MeshFitter, MeshResult
from .meshes import MeshCandidate, axis_names, left_out
from .op_kinds import OpKinds
from .outcomes import mesh_outcomes
from .plan import Plan
from .problem_structure import ProblemStructure
from .search import relax, solve
from .search_options import SearchOptions
from .spaces import ChoiceSpaces
from .storage_options import StoragePricing
from .tables import Tables

NEAR = 0.03
"""The gap to the bound from which on the splits of plan strings are tried too."""


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
    """There is no plan without a pipeline. Finding out why is slow, so it waits until somebody reads the message.

    bound     if there is one after all, it takes no less
    """

    def __init__(self, why: Callable[[], PlanError], bound: float) -> None:
        super().__init__()
        self._why, self.bound = why, bound

    @cached_property
    def _message(self) -> str:
        return str(self._why())

    def __str__(self) -> str:
        return self._message


class _MeshSearch:
    """One search."""

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
        self.fitter = MeshFitter(self.frame, options, self.late)

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
                results.append(MeshResult(candidate=candidate, bound=bound, within=bound, plain=tables, tables=tables))
            self.options.report(f"bounded {candidate}", math.inf)
            if self.late() and results:
                stopped = True
                break
        fitter = self.fitter
        for at in sorted(range(len(results)), key=lambda at: results[at].bound):
            if results[at].bound >= fitter.upper:
                break
            if self.late() and fitter.best is not None:
                stopped = True
                break
            results[at] = fitter.fit(results[at])
            best = fitter.best.time if fitter.best is not None else math.inf
            self.options.report(f"solved {results[at].candidate}", best)
        if self._is_short(results):
            self._try_known_splits()
        if fitter.best is None:
            self._try_lasting_sums(results)
        if fitter.best is None:
            self._try_without_gathers()
        if fitter.best is not None and all(result is not fitter.best for result in results):
            chosen = fitter.best
            results = [chosen, *(result for result in results if result.candidate != chosen.candidate)]
        if fitter.best is None:
            bound = min((result.within for result in results), default=math.inf)
            raise NothingFits(lambda: self._nothing_fits(results), bound)
        return self._result(fitter.best, results, stopped, left_out(self.cluster, self.size))

    def _is_short(self, results: Sequence[MeshResult]) -> bool:
        """Whether memory is why the best plan is slower than its bound, and there is none from before to beat."""
        best, bound = self.fitter.best, min((result.within for result in results), default=math.inf)
        if self.options.upper < math.inf:
            return False
        return best is None or (best.within < best.time and best.time > bound * (1 + NEAR))

    def _try_known_splits(self) -> None:
        """Fit the splits of plan strings that may be faster than the best plan."""
        for candidate, tables in known_splits(self.frame):
            self._try(candidate, tables)

    def _try_lasting_sums(self, results: Sequence[MeshResult]) -> None:
        """Fit all meshes by sums of what lasts: where nothing fits, what a mean layer has for a while may be why."""
        self.fitter.weights = lasting_memory()
        for result in results:
            self._try(result.candidate, result.plain)
        self.fitter.weights = memory()

    def _try_without_gathers(self) -> None:
        """Fit all meshes with parameters that are never gathered: where nothing else fits, gathers may be why."""
        graph, limits = self.analysis.graph, self.frame.limits
        storing = {parameter.key: ungathered(limits.storing.get(parameter.key)) for parameter in graph.parameters}
        frame = SearchContext(
            self.analysis, self.cluster, self.training, replace(limits, storing=storing),
            size=self.size, per_replica=self.options.data_only, recompute=self.options.recompute,
        )  # fmt: skip
        self.fitter.context = frame
        for candidate in frame.candidates():
            tables = frame.tables(frame.plain, candidate)
            if tables is not None:
                self._try(candidate, tables)

    def _try(self, candidate: MeshCandidate, tables: Tables) -> None:
        bound = relax(tables.problem())
        if bound < self.fitter.upper and not self.late():
            self.fitter.fit(MeshResult(candidate=candidate, bound=bound, within=bound, plain=tables, tables=tables))
        self.options.report(f"tried {candidate} where memory is short", math.inf)

    def _result(
        self, best: MeshResult, results: Sequence[MeshResult], stopped: bool, notes: Iterable[str]
    ) -> SearchResult:
        assert best.solution is not None
        bound = min(result.within for result in results)
        unique_notes = dict.fromkeys(
            (*notes, *(note for result in results for note in result.tables.spaces.left_out()))
        )
        plan = _plan(self.analysis, self.cluster, best, self.options.constraints)
        return SearchResult(
            plan=replace(plan, notes=(*plan.notes, *(f"the search: {note}" for note in unique_notes))),
            best=best,
            meshes=tuple(results),
            bound=min(bound, best.time),
            limit=self.limit,
            slack=self.options.slack,
            seconds=time.monotonic() - self.began,
            stopped=stopped or best.solution.stopped,
        )

    def _nothing_fits(self, results: Sequence[MeshResult]) -> PlanError:
        """Say what clashes, or if the model alone does not fit, how far it is from it."""
        leanest = self.fitter.leanest
        reserve = max(0.0, leanest.beside_lasting) if leanest is not None else 0.0
        clash = find_clash(self.constraints, self._frame, reserve)
        if clash is not None and any(item in self.options.constraints.items for item in clash.items):
            return PlanError(str(clash))
        sums = (result.solution.least_memory for result in results if result.solution is not None)
        least = leanest.needs if leanest is not None else min(sums, default=math.inf)
        graph, there = self.analysis.graph, format_bytes(self.limit)
        model = f"{graph.name} with a batch of {graph.batch} does not fit:"
        outputs = self._output_bytes()
        if outputs > self.limit:
            return PlanError(
                f"{model} its outputs alone, which every device gets whole, take {format_bytes(outputs)}, and there "
                f"are {there} on a device; leave them sharded and return the loss alone: "
                'CompileOptions(outputs="scalars")'
            )
        return PlanError(
            f"{model} the leanest plan that was found needs {format_bytes(least)} on a device, and there are "
            f"{there}; use more devices, a smaller batch or a larger memory="
        )

    def _output_bytes(self) -> float:
        """Bytes of what leaves the model."""
        values = self.analysis.graph.values
        names = {output.value for output in self.analysis.graph.outputs if output.value is not None}
        return sum(values[name].elements * self.training.item(values[name]) for name in names)


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

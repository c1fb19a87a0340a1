"""The small plan that represents a plan in a rehearsal, found by trying sizes until the programs match.

The sizes of atoms and axes can change a program: two sizes that are equal by chance make parts equal that were not,
and the cheapest path between two layouts may depend on the lengths of the axes. So the plan is lowered at real and at
small sizes, and if the two programs differ in more than sizes, others are tried.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from typing import Any

from torch import nn

from ..capture import CapturedGraph
from ..errors import PlanError
from ..ir import Graph
from ..lower import LoweredProgram
from ..plan import Plan
from ..probe import probing
from ..rules import Analysis, analyse
from ..verify import Report
from .layers import Decided, KeptLayers, drop_layers
from .result import Rehearsal, collectives_of, differences
from .shrink import fit, widened
from .sizes import Shared, Sizes, choose_sizes, small_axes
from .small_call import SmallCall
from .stages import SmallCluster, shrink_cluster
from .translate import decided_by, lowered, shared_by, storage_of, stored_by, translated

TRIES = 9
"""Maximum number of sizes that are tried until the small program matches the real one."""


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """A plan at small sizes, with its graph. `changed`: differences of its program from the plan's, except sizes."""

    layers: tuple[KeptLayers, ...]
    real: Plan  # for the same layers, at real sizes
    sizes: Sizes
    graph: Graph
    plan: Plan
    programs: tuple[LoweredProgram, ...]
    changed: tuple[str, ...]
    small_call: SmallCall

    def result(self, title: str, known: Plan, report: Report, seconds: float) -> Rehearsal:
        """The result of a run."""
        real, small = ([stage.mesh for stage in plan.stages] for plan in (self.real, self.plan))
        pairs = dict.fromkeys((str(long), str(short)) for long, short in zip(real, small, strict=True))
        return Rehearsal(
            title=title, meshes=tuple(pairs), devices=(known.size, self.plan.size),
            microbatches=(known.microbatches, self.plan.microbatches),
            schedule=known.schedule if known.is_pipeline else "", layers=self.layers,
            sizes=tuple(sorted(self.sizes.images.items())), kept=self.sizes.kept(),
            collectives=collectives_of(self.programs), changed=self.changed, report=report, seconds=seconds,
        )  # fmt: skip


def shrink(plan: Plan, captured: CapturedGraph, model: nn.Module, leaves: Sequence[Any], seed: int = 0) -> SmallPlan:
    """A plan for a captured call at small sizes, which runs on one device. `leaves` are the call's arguments."""
    graph = captured.graph
    _check(plan, graph)
    cluster = shrink_cluster(plan, plan.entries[graph.entry])
    decided, layers, rename = drop_layers(decided_by(plan, widened(graph), cluster))
    analysis = analyse(decided.graph, probing(captured.functions))
    meshes = cluster.meshes_of(cluster.axes)
    real = translated(plan, decided, analysis, meshes, replace(cluster, microbatches=plan.microbatches))
    try:
        programs = lowered(decided.graph, real, analysis)
    except PlanError as error:
        raise PlanError(f"the plan does not fit this call of the model, which must have the size that the plan "
                        f"was made for (--batch, --seq): {error}") from error  # fmt: skip
    shrinker = _Shrinker(
        plan=plan, cluster=cluster, decided=decided, layers=layers, analysis=analysis, real=real, programs=programs,
        shared=(*shared_by(decided, analysis, meshes, plan.microbatches), *stored_by(analysis, programs, meshes)),
        small_call=SmallCall(captured=captured, module=model, leaves=tuple(leaves), rename=rename, seed=seed),
    )  # fmt: skip
    return shrinker.best()


@dataclass(frozen=True, kw_only=True)
class _Shrinker:
    """A plan and a graph of few layers at real sizes, and which shards must stay even or uneven."""

    plan: Plan
    cluster: SmallCluster
    decided: Decided
    layers: tuple[KeptLayers, ...]
    analysis: Analysis
    real: Plan
    programs: tuple[LoweredProgram, ...]
    shared: tuple[Shared, ...]
    small_call: SmallCall

    def best(self) -> SmallPlan:
        """The first small plan whose program matches the real one, or else the closest."""
        best: SmallPlan | None = None
        refusal: PlanError | None = None
        for axes, gap in islice(self._tries(), TRIES):
            try:
                candidate = self._at(axes, gap)
            except PlanError as error:
                refusal = refusal or error
                continue
            if best is None or len(candidate.changed) < len(best.changed):
                best = candidate
            if not candidate.changed:
                break
        if best is None:
            assert refusal is not None
            raise refusal
        return best

    def _tries(self) -> Iterator[tuple[Mapping[str, int], int]]:
        """Sizes of axes, and the minimum distance between sizes of atoms."""
        axes = tuple(
            islice(small_axes(self.analysis, self.shared, self.cluster.axes, self.cluster.microbatches), TRIES)
        )
        yield from ((few, gap) for gap, few in product((1, 2, 3), axes[:3]))
        yield from ((few, 1) for few in axes[3:])

    def _at(self, axes: Mapping[str, int], gap: int) -> SmallPlan:
        captured, cluster = self.small_call.captured, self.cluster
        sizes = choose_sizes(self.analysis, self.shared, axes, gap)
        small = fit(self.decided.graph, sizes, captured.functions, self.small_call.attempt)
        analysis = analyse(small, probing(captured.functions))
        plan = translated(self.plan, replace(self.decided, graph=small), analysis, cluster.meshes_of(axes), cluster)
        programs = lowered(small, plan, analysis)
        changed = (*differences(self.programs, programs), *self._stored_otherwise(programs, plan))
        return SmallPlan(
            layers=self.layers, real=self.real, sizes=sizes, graph=small, plan=plan, programs=programs, changed=changed,
            small_call=self.small_call,
        )  # fmt: skip

    def _stored_otherwise(self, programs: Sequence[LoweredProgram], plan: Plan) -> list[str]:
        """The parameters that are stored differently from the plan."""
        real = storage_of(self.programs, [stage.mesh for stage in self.real.stages])
        small = storage_of(programs, [stage.mesh for stage in plan.stages])
        return [f"{long} is {short} at small sizes" for long, short in zip(real, small, strict=True) if long != short]


def _check(plan: Plan, graph: Graph) -> None:
    """Refuse what can't be rehearsed."""
    plan.check_against(graph)
    if graph.entry not in plan.entries:
        raise PlanError(f"the plan has no entry {graph.entry!r}, but a rehearsal trains; it has "
                        f"{', '.join(plan.entries)}")  # fmt: skip
    if plan.local:
        raise PlanError(
            'a plan for PipelineOptions(semantics="local") has no rehearsal: it does not compute what one device does'
        )
    if graph.branches:
        op = next(op for op in graph.ops if op.target in ("call.cond", "call.scan", "call.while_loop"))
        raise PlanError(f"{op} has subgraphs, which can't be scaled down; use sw.verify on a small model")

"""Whether a plan keeps to constraints: for plans that no search has made, which could not do otherwise."""

from __future__ import annotations

from collections.abc import Iterator

from ..cluster import Cluster
from ..errors import PlanError, raise_all
from ..ir.paths import is_inside
from ..rules import Analysis, Choices
from .by_hand import batch_axes, check_decided
from .constraint_kinds import AxisConstraint
from .limits import Limits
from .plan import Plan
from .stages import OpSequence


def check_kept(plan: Plan, analysis: Analysis, limits: Limits, cluster: Cluster | None) -> None:
    """Refuse a plan that does not keep to constraints, with all that it does not keep to."""
    stages = plan.entries[analysis.graph.entry]
    faults = [
        *_axes(plan, analysis, limits, cluster),
        *_storage(plan, analysis, limits),
        *_pipeline(plan, limits),
        *_cuts(plan, analysis, limits),
    ]
    recomputed = {path for stage in stages for path in stage.recompute}
    for path in limits.must:
        if not any(is_inside(path, outer) for outer in recomputed):
            faults.append(f"{path} has to be recomputed, and is not")
    chunked = {name: chunks for stage in stages for name, chunks in stage.chunked_loss.items()}
    for name, chunks in limits.chunked.items():
        if name not in chunked or chunks not in (None, chunked[name]):
            faults.append(f"{name} has to be chunked{f' in {chunks}' if chunks else ''}, and is not")
    faults += [f"{name} must not be chunked, and is" for name in limits.unchunked if name in chunked]
    raise_all(PlanError, "the plan does not keep to the constraints:", faults)
    check_decided(analysis, stages, limits)


def _axes(plan: Plan, analysis: Analysis, limits: Limits, cluster: Cluster | None) -> Iterator[str]:
    for stage in plan.entries[analysis.graph.entry]:
        for name, demands in limits.axes.items():
            if name not in stage.mesh.names:
                source = next((str(demand.source) for demand in demands), "a constraint")
                yield f"{source}: there is no axis {name!r}, the mesh is {stage.mesh}"
                continue
            for demand in demands:
                size = stage.mesh.sizes[name]
                if demand.size is not None and size not in demand.size:
                    yield f"{demand.source}: {name} has {size} devices"
                if demand.data:
                    yield from _other_splits(analysis, stage.choices, demand)
                if demand.inside and cluster is None:
                    yield f"{demand.source}: that needs a cluster to look at; pass cluster="
                spans = cluster.spans(stage.mesh, (name,)) if demand.inside and cluster is not None else ()
                if any(len(span.ranks) > 1 for span in spans):
                    yield f"{demand.source}: on {cluster} {name}={size} lies between nodes"


def _other_splits(analysis: Analysis, choices: Choices, demand: AxisConstraint) -> Iterator[str]:
    for name, choice in choices.items():
        role = analysis.signatures[name].picked(choice.get(demand.name))
        if role is not None and role.atom not in analysis.batch:
            yield f"{demand.source}: {name} is split on {role.name} there"
            return


def _storage(plan: Plan, analysis: Analysis, limits: Limits) -> Iterator[str]:
    stages = plan.entries[analysis.graph.entry]
    copies = [axis for stage in stages for axis in batch_axes(analysis, stage.choices, stage.mesh)]
    for parameter in analysis.graph.parameters:
        limit, stored = limits.storing.get(parameter.key), plan.storage.get(parameter.key)
        if limit is None:
            continue
        sharded = 0 if stored is None else len(stored.sharded())
        axes = () if stored is None else stored.axes
        if sharded > limit.zero.most or (parameter.trainable and sharded < limit.zero.least and copies):
            yield f"{parameter.key} is stored with ZeRO-{sharded}, and {limit.zero} is asked for"
        elif sharded and limit.on is not None and axes != (limit.on,):
            yield f"{parameter.key} is sharded over {', '.join(axes)}, and {limit.on} is asked for"


def _pipeline(plan: Plan, limits: Limits) -> Iterator[str]:
    pp_ranks = len({stage.mesh.devices for stage in plan.stages})
    for what, number in (("stages", pp_ranks), ("microbatches", plan.microbatches)):
        wanted = limits.count(what)
        if wanted is not None and number not in wanted:
            yield f"the plan has {number} {what}, and {wanted} are asked for"
    if limits.schedule is not None and plan.is_pipeline and plan.schedule != limits.schedule:
        yield f"the schedule is {plan.schedule}, and {limits.schedule} is asked for"


def _cuts(plan: Plan, analysis: Analysis, limits: Limits) -> Iterator[str]:
    stages = plan.entries[analysis.graph.entry]
    stage_of = {name: number for number, stage in enumerate(stages) for name in stage.choices}
    line = OpSequence(analysis)
    for op in limits.pivots:
        at = line.place_of(op)
        if 0 < at < len(line.ops) and stage_of[line.ops[at].name] == stage_of[line.ops[at - 1].name]:
            yield f"no stage begins with {op}"
    for path, ops in limits.uncut.items():
        if len({stage_of[op.name] for op in ops if op.name in line.place}) > 1:
            yield f"{path} is in several stages"

"""A plan for a unit of devices, repeated over more: a plan for 8 run on 64 is dp=8 of it.

Each copy has the plan, and its share of the batch. The axis over copies is the outermost one, and splits the batch of
every op that has it; what is computed from parameters alone is the same in all copies, and gradients are summed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..cluster import Cluster
from ..errors import PlanError
from ..ir import Graph
from ..layout import MB, Axis, Mesh
from ..rules import Analysis, analyse
from ..rules.replica_axes import replicas
from ..schedule import Schedule
from .builder import PlanBuilder
from .file import load
from .pipeline import StagedOps, assemble, build_pipeline, check_microbatches, usual_microbatches
from .plan import Plan
from .policies import build_plan, dp
from .policy_call import analysis_of_call
from .strings import parse_plan_string

Unit = str | Path | Plan | Callable[[Graph, Cluster], Any]
"""A plan string, a plan file, a plan, or a policy."""


def repeated(unit: Unit, copies: int) -> Callable[[Graph, Cluster], Plan]:
    """A policy: a plan for a unit of devices, on `copies` times as many, each copy with its share of the batch."""
    if copies < 2:
        raise PlanError(f"{copies} copies of a plan repeat nothing; pass 2 or more, or the plan as it is")

    def policy(graph: Graph, cluster: Cluster) -> Plan:
        analysis = analysis_of_call(graph) or analyse(graph)
        plan = _plan_of(unit, graph, cluster, analysis, copies)
        plan.check_against(graph)
        return repeat(plan, analysis, copies)

    policy.__qualname__ = f"{copies} copies of {unit.policy if isinstance(unit, Plan) else _name(unit)}"
    return policy


def _name(unit: Unit) -> str:
    return str(getattr(unit, "__qualname__", unit))


def _plan_of(unit: Unit, graph: Graph, cluster: Cluster, analysis: Analysis, copies: int) -> Plan:
    if isinstance(unit, Plan):
        return unit
    if isinstance(unit, Path) or (isinstance(unit, str) and unit.endswith(".json")):
        return load(unit, graph)
    if isinstance(unit, str):
        request = parse_plan_string(unit)
        if not request.stages:
            return build_plan(graph, request, analysis)
        groups = copies * max(replicas(request.mesh_of(size)) for size in request.stages)
        count = usual_microbatches(graph, len(request.stages), groups)
        return build_pipeline(graph, request, analysis, microbatches=count)
    plan = unit(graph, cluster)
    if not isinstance(plan, Plan):
        raise PlanError(
            f"{_name(unit)} leaves something to the search, which would plan for the whole batch; let it return "
            "build(), or save a plan for its devices and repeat the file"
        )
    return plan


def repeat(plan: Plan, analysis: Analysis, copies: int) -> Plan:
    """A plan with its devices several times."""
    graph, unit = analysis.graph, plan.size
    stages = plan.entries[graph.entry]
    axis_names = {name for stage in stages for name in stage.mesh.names}
    name = next(name for name in ("dp", *(f"dp{number}" for number in range(2, 10))) if name not in axis_names)
    outer = Axis(name=name, size=copies)
    meshes = tuple(
        Mesh(
            axes=(outer, *stage.mesh.axes),
            devices=tuple(copy * unit + device for copy in range(copies) for device in stage.mesh.devices),
        )
        for stage in stages
    )
    check_microbatches(graph, plan.microbatches, max(map(replicas, meshes)), plan.local)
    staged = StagedOps(
        parts=tuple(tuple(stage.choices) for stage in stages),
        meshes=meshes,
        microbatches=plan.microbatches,
        schedule=plan.schedule,
        steps=None if plan.steps is None else _repeated_steps(Schedule.from_json(plan.steps), copies).to_json(),
        local=plan.local,
    )

    def decide(builder: PlanBuilder, names: Collection[str]) -> None:
        dp(builder, outer)
        _copy(builder, plan, names)

    notes = (*plan.notes, f"{copies} copies of a plan for {unit} devices, each with its share of the batch ({name})")
    return replace(assemble(analysis, staged, decide), notes=notes, cluster=plan.cluster, batch_norm=plan.batch_norm)


def _copy(builder: PlanBuilder, plan: Plan, names: Collection[str]) -> None:
    """Write the choices of a plan to a plan builder, along the axes of a copy."""
    graph, inner = builder.graph, [axis.name for axis in builder.mesh.axes if axis.name != MB]
    read = {value for name in names for value in graph.by_name[name].inputs}
    for stage in plan.entries[graph.entry]:
        for name, choice in stage.choices.items():
            if name not in names:
                continue
            for axis in stage.mesh.names:
                if axis in choice and axis in inner:
                    builder.choices.setdefault(name, {})[axis] = choice[axis]
                else:
                    builder.unsplit.add((name, axis))
        if any(name in names for name in stage.choices):
            builder.recomputed += [path for path in stage.recompute if path not in builder.recomputed]
            builder.chunked |= stage.chunked_loss
    keys = [parameter.key for parameter in graph.parameters if parameter.value in read]
    builder.storage |= {key: plan.storage[key].written() for key in keys if key in plan.storage}


def _repeated_steps(schedule: Schedule, copies: int) -> Schedule:
    """A schedule whose devices are there several times, and do the same."""
    unit = len(schedule.devices)
    holders = (
        tuple(sorted(copy * unit + device for copy in range(copies) for device in devices))
        for devices in schedule.holders
    )
    return replace(schedule, devices=schedule.devices * copies, holders=tuple(holders))

"""Pipelines in a plan: pipeline ranks, the stages they run, microbatches.

A microbatch is a split of the batch along an axis in time, MB. Ops are split on it as on a data-parallel axis, only
that no rank can communicate over it: what an op would need from other microbatches it can't have, except for what
depends on inputs alone, which is computed for all of them first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..cost import flops
from ..errors import PlanError
from ..ir import Graph, Op
from ..ir.recompute import faults_of
from ..layout import MB, Axis, Mesh
from ..rules import Analysis, analyse
from ..rules.replica_axes import replicas
from ..schedule import USUAL, Schedule, fewer, forward_only, schedule_kind, spread
from .builder import PlanBuilder
from .by_hand import decide
from .chunking import continued_chunks
from .limits import Limits
from .plan import Plan, PlanStage
from .policies import apply, dp, tp
from .stages import OpSequence, balanced
from .strings import PolicyRequest
from .subaxes import refine


def timed(mesh: Mesh, microbatches: int, *, inside: bool = False) -> Mesh:
    """A mesh with the axis in time, as if each microbatch had devices of its own.

    Outermost, so that a microbatch is a run of the batch's samples. `inside` the others where each data-parallel group
    has its own samples, of which a microbatch is a run.
    """
    if microbatches == 1:
        return mesh
    time = (Axis(name=MB, size=microbatches),)
    return Mesh(axes=(*mesh.axes, *time) if inside else (*time, *mesh.axes))


def usual_microbatches(graph: Graph, stages: int, replicas: int) -> int:
    """The number of microbatches if nobody says: about four a stage, as far as the batch divides."""
    samples = (graph.batch or 1) // replicas
    return max(count for count in range(1, min(samples, 4 * stages) + 1) if samples % count == 0) if samples else 1


def pipeline_ranks_of(stages: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The devices of each stage, in order."""
    pp_ranks, at = [], 0
    for size in stages:
        pp_ranks.append(tuple(range(at, at + size)))
        at += size
    return tuple(pp_ranks)


Decide = Callable[[PlanBuilder, Collection[str]], None]
"""Writes to the plan builder of a mesh what is decided for the ops that run on it."""


@dataclass(frozen=True, kw_only=True)
class StagedOps:
    """Ops by stage, the mesh of each stage with its devices, and how they run.

    schedule   the name of a known schedule, or of `steps`
    local      each microbatch is a batch of its own
    """

    parts: tuple[tuple[str, ...], ...]
    meshes: tuple[Mesh, ...]
    microbatches: int
    schedule: str
    steps: Mapping[str, Any] | None = None
    local: bool = False


def build_pipeline(
    graph: Graph,
    request: PolicyRequest,
    analysis: Analysis | None = None,
    cluster: str = "",
    microbatches: int | None = None,
    local: bool = False,
    limits: Limits | None = None,
) -> Plan:
    """The plan that a plan string with stages, or with microbatches, asks for, under constraints."""
    analysis, limits = analysis or analyse(graph), limits or Limits()
    request, notes = refine(request, analysis, tp)
    stages = request.stages or (request.mesh.size,)
    kind = request.schedule or USUAL
    groups = max(replicas(request.mesh_of(size)) for size in stages)
    count = microbatches or usual_microbatches(graph, len(stages), groups)
    check_microbatches(graph, count, groups, local)
    line = OpSequence(analysis)
    cuts = _cuts(line, len(stages) * kind.stages_per_rank, limits)
    meshes = [replace(request.mesh_of(len(own)), devices=own) for own in pipeline_ranks_of(stages)]
    staged = StagedOps(
        parts=line.parts(cuts),
        meshes=tuple(meshes[pp_rank] for (pp_rank,) in kind.holders(len(stages))),
        microbatches=count,
        schedule=kind.name,
        local=local,
    )

    def both(builder: PlanBuilder, names: Collection[str]) -> None:
        builder.notes += notes
        apply(builder, request, builder.mesh.size // (1 if local else count))
        decide(builder, limits, names)

    plan = assemble(analysis, staged, both)
    return replace(plan, policy=str(request), cluster=cluster)


def _cuts(line: OpSequence, count: int, limits: Limits) -> tuple[int, ...]:
    """Where a line is cut into stages: before the modules that constraints name, or so that stages are balanced."""
    if not limits.pivots:
        return balanced(line, [flops(line.analysis.signatures[op.name]) for op in line.ops], count)
    return line.cuts_before(limits.pivots, count)


def assemble(analysis: Analysis, staged: StagedOps, decide: Decide) -> Plan:
    """The plan of ops that are cut into stages. `decide` is called once for each mesh."""
    graph = analysis.graph
    names_on: dict[tuple[Axis, ...], set[str]] = {}
    for part, mesh in zip(staged.parts, staged.meshes, strict=True):
        names_on.setdefault(mesh.axes, set()).update(part)
    count = 1 if staged.local else staged.microbatches
    drawn = {axes: _drawn(analysis, Mesh(axes=axes), count, decide, names) for axes, names in names_on.items()}
    planned = tuple(
        PlanStage(
            mesh=mesh,
            choices={name: drawn[mesh.axes].choices.get(name, {}) for name in part},
            recompute=_recomputed(graph, part, drawn[mesh.axes].recomputed),
            chunked_loss=_inside(part, drawn[mesh.axes].chunked_loss),
        )
        for part, mesh in zip(staged.parts, staged.meshes, strict=True)
    )
    plans = [builder.plan for builder in drawn.values()]
    return replace(
        plans[0],
        storage={key: stored for plan in plans for key, stored in plan.storage.items()},
        notes=tuple(dict.fromkeys(note for plan in plans for note in plan.notes)),
        entries={graph.entry: planned},
        microbatches=staged.microbatches,
        schedule=staged.schedule,
        steps=staged.steps,
        local=staged.local,
    )


class _Drawn:
    """What is chosen on a mesh, for the whole graph."""

    def __init__(self, builder: PlanBuilder) -> None:
        self.plan = builder.finish("")
        self.choices: Mapping[str, Mapping[str, str]] = self.plan.choices(builder.graph.entry)
        self.recomputed = tuple(builder.recomputed)
        self.chunked_loss = self.plan.stages[0].chunked_loss


def _drawn(analysis: Analysis, mesh: Mesh, microbatches: int, decide: Decide, names: Collection[str]) -> _Drawn:
    builder = PlanBuilder(analysis.graph, timed(mesh, microbatches), analysis)
    if microbatches > 1:
        split_in_time(builder, Axis(name=MB, size=microbatches))
    decide(builder, names)
    return _Drawn(builder)


def split_in_time(builder: PlanBuilder, axis: Axis) -> None:
    """The policy of microbatches: data parallel, without communication.

    What depends on inputs alone and is read replicated is computed replicated; every rank has the inputs.
    """
    dp(builder, axis)
    for op in builder.ops:  # where the batch dim is a sequence, attention needs all of it
        role = builder.role_on(op, axis)
        if role is not None and any(builder.signature(op).is_split_by(name, role) for name in ("ring", "queries")):
            del builder.choices[op.name][axis.name]
    graph, analysis = builder.graph, builder.analysis
    known = {item.value for item in graph.inputs} | {item.value for item in graph.buffers} | analysis.constants
    early = []
    for op in builder.ops:
        if all(name in known for name in op.inputs) and not any(graph.values[name].gradient for name in op.outputs):
            known.update(op.outputs)
            early.append(op)
    builder.foreseen[axis.name] = frozenset(name for op in early for name in op.outputs)
    for op in reversed(early):
        if builder.chosen(op, axis) is not None and any(
            _read_replicated(builder, axis, op, name) for name in op.outputs
        ):
            del builder.choices[op.name][axis.name]


def _read_replicated(builder: PlanBuilder, axis: Axis, op: Op, value: str) -> bool:
    """Whether a value that an axis shards is read by an op that needs it replicated."""
    if builder.output_layout(op, value).shard_of(axis.name) is None:
        return False
    for user, index in builder.graph.users[value]:
        choice = builder.choices.get(user.name, {})
        inputs, _ = builder.signature(user).layouts({k: v for k, v in choice.items() if k == axis.name}, builder.mesh)
        if inputs[index].shard_of(axis.name) is None:
            return True
    return False


def _recomputed(graph: Graph, part: Sequence[str], paths: Sequence[str]) -> tuple[str, ...]:
    inside = set(part)
    return tuple(path for path in paths if any(op.name in inside for op in graph.under[path]))


def _inside(part: Sequence[str], chunked_loss: Mapping[str, int]) -> dict[str, int]:
    return {name: chunks for name, chunks in chunked_loss.items() if name in part}


def check_microbatches(graph: Graph, count: int, replicas: int, local: bool) -> None:
    """Refuse a number of microbatches that the batch does not divide by."""
    if count == 1 and replicas == 1:
        return
    if graph.batch is None:
        raise PlanError(f"{count} microbatches split the batch, but the inputs have no common batch dim; use 1")
    samples = graph.batch * (count if local else 1)
    if count > samples:
        raise PlanError(f"{count} microbatches are more than the batch has samples ({samples}); use {samples} at most")
    if samples % (count * replicas):
        fitting = [n for n in range(1, samples + 1) if samples % (n * replicas) == 0]
        raise PlanError(
            f"a batch of {samples} does not divide into {count} microbatches"
            + (f" on {replicas} data-parallel devices" if replicas > 1 else "")
            + (f"; {', '.join(map(str, fitting))} would do" if fitting else "")
        )


def microbatches_of(plan: Plan, graph: Graph) -> int:
    """The microbatches of a specialization: the plan's, or the next smaller number that a smaller batch divides by."""
    groups = max(map(replicas, _meshes(plan)))
    samples = (graph.batch or 1) * (plan.microbatches if plan.local else 1)
    return next((count for count in range(plan.microbatches, 1, -1) if samples % (count * groups) == 0), 1)


def _meshes(plan: Plan) -> list[Mesh]:
    return [stage.mesh for stage in plan.stages]


def schedule_of(plan: Plan, microbatches: int | None = None, *, training: bool = True) -> Schedule:
    """The schedule that a plan names, over its devices."""
    meshes, count = _meshes(plan), plan.microbatches if microbatches is None else microbatches
    pp_ranks = list(dict.fromkeys(mesh.devices for mesh in meshes))
    holders = tuple(tuple(sorted(mesh.devices)) for mesh in meshes)
    if not training:
        return forward_only(holders, count)
    if plan.steps is not None:
        schedule = fewer(Schedule.from_json(plan.steps), count)
    else:
        kind = schedule_kind(plan.schedule) if plan.schedule else USUAL
        schedule = spread(kind.make(len(pp_ranks), count), pp_ranks)
    if schedule.holders != holders:
        raise PlanError(
            f"the schedule {schedule.name} has stages on devices {_listed(schedule.holders)}, and the plan on "
            f"{_listed(holders)}; name another schedule, or cut the model as this one wants it"
        )
    return schedule


def _listed(pp_ranks: Sequence[Sequence[int]]) -> str:
    return ", ".join("+".join(map(str, pp_rank)) for pp_rank in pp_ranks)


def continue_pipeline(plan: Plan, analysis: Analysis) -> Plan:
    """A pipeline with one more specialization: ops of the same names have the stage and split of the first."""
    graph, line = analysis.graph, OpSequence(analysis)
    known = {name: number for number, stage in enumerate(plan.stages) for name in stage.choices}
    parts = parts_like(line, known, len(plan.stages))
    count = 1 if plan.local else microbatches_of(plan, graph)
    chunked, notes = continued_chunks(plan, graph, count)
    drawn = {mesh: same_choices(plan, analysis, mesh, count) for mesh in dict.fromkeys(_meshes(plan))}
    planned = tuple(
        PlanStage(
            mesh=stage.mesh,
            choices={name: drawn[stage.mesh].get(name, {}) for name in part},
            recompute=_recomputed(graph, part, [path for path in stage.recompute if not faults_of(graph, path)]),
            chunked_loss=_inside(part, chunked),
        )
        for stage, part in zip(plan.stages, parts, strict=True)
    )
    return replace(
        plan,
        entries={**plan.entries, graph.entry: planned},
        fingerprints={**plan.fingerprints, graph.entry: graph.fingerprint},
        notes=tuple(dict.fromkeys((*plan.notes, *notes))),
    )


def parts_like(line: OpSequence, known: Mapping[str, int], count: int) -> tuple[tuple[str, ...], ...]:
    """All ops by stage, those on the line where they are known to be, others with what they read."""
    stage_of: dict[str, int] = {}
    for op in line.ops:
        makers = [line.graph.producer.get(name) for name in op.inputs]
        before = [stage_of[maker.name] for maker in makers if maker is not None and maker.name in stage_of]
        stage_of[op.name] = max([known.get(op.name, 0), *before])
    return line.settled(stage_of, count)


def same_choices(plan: Plan, analysis: Analysis, mesh: Mesh, microbatches: int = 1) -> Mapping[str, Mapping[str, str]]:
    """What ops do on a mesh, by what those of the same names do on it."""
    builder = PlanBuilder(analysis.graph, timed(mesh, microbatches), analysis)
    if microbatches > 1:
        split_in_time(builder, Axis(name=MB, size=microbatches))
    for stage in plan.stages:
        for name, choice in stage.choices.items() if stage.mesh == mesh else ():
            op = analysis.graph.by_name.get(name)
            if op is None or analysis.is_constant(op):
                continue
            for axis in mesh.axes:
                role = builder.signature(op).picked(choice.get(axis.name))
                if role is not None and role.fills(axis.size) and builder.divides(op, axis, role):
                    builder.split(op, axis, role)
    return builder.finish("").choices(analysis.graph.entry)

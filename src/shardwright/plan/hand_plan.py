"""Plans that a policy has written down: of one mesh, or of stages on devices with a schedule.

A stage is a set of ops, and a mesh with devices of its own. Stages share all devices or none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from ..errors import PlanError, ScheduleError, raise_all
from ..layout import REPLICATE, Axis, Mesh
from ..rules import Analysis
from ..rules.replica_axes import replicas
from ..schedule import UNIT, USUAL, Schedule, Step, check, greedy, reordered, schedule_kind, spread
from .builder import PlanBuilder
from .by_hand import check_decided, decide, follow
from .constraint_kinds import ConstraintSource
from .limits import Limits
from .pipeline import StagedOps, assemble, check_microbatches, parts_like, usual_microbatches
from .plan import Plan
from .stages import OpSequence, split_graph


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlacement:
    """Ops that a policy has placed on the devices of a mesh, and where it says so."""

    names: tuple[str, ...]
    mesh: Mesh
    source: ConstraintSource


@dataclass(frozen=True, kw_only=True)
class ScheduleDecisions:
    """What a policy says about the schedule.

    kind    the name of a known one
    steps   for each pipeline rank its steps in order
    pairs   steps of which the first runs before the second
    """

    kind: str | None = None
    steps: tuple[str, ...] = ()
    microbatches: int | None = None
    pairs: tuple[tuple[Step, Step], ...] = ()
    sources: tuple[ConstraintSource, ...] = ()

    @property
    def is_by_hand(self) -> bool:
        """Whether it is no known schedule as it is."""
        return bool(self.steps or self.pairs)

    @property
    def is_pipeline(self) -> bool:
        """Whether something runs by a schedule, in several stages or in one."""
        return bool(self.kind or self.is_by_hand) or (self.microbatches or 1) > 1

    def with_kind(
        self, steps: str | Sequence[str] | None, microbatches: int | None, source: ConstraintSource
    ) -> ScheduleDecisions:
        """The same with a schedule, or a number of microbatches, or both."""
        named = steps if isinstance(steps, str) else None
        return replace(
            self,
            kind=self.kind if steps is None else named,
            steps=self.steps if steps is None else () if isinstance(steps, str) else tuple(steps),
            microbatches=self.microbatches if microbatches is None else microbatches,
            sources=(*self.sources, source),
        )

    def with_pair(self, pair: tuple[Step, Step], source: ConstraintSource) -> ScheduleDecisions:
        """The same with one more pair of steps."""
        return replace(self, pairs=(*self.pairs, pair), sources=(*self.sources, source))


def build_flat(analysis: Analysis, mesh: Mesh, limits: Limits) -> Plan:
    """The plan of one mesh."""
    builder = PlanBuilder(analysis.graph, mesh, analysis)
    _decide_all(builder, limits)
    plan = builder.finish("")
    check_decided(analysis, plan.stages, limits)
    return with_storage_notes(plan, analysis, limits)


def _decide_all(builder: PlanBuilder, limits: Limits, names: Collection[str] | None = None) -> None:
    decide(builder, limits, names)
    for axis in builder.mesh.axes:
        follow(builder, axis, limits, names)


def build_stages(
    analysis: Analysis, placed: Sequence[StagePlacement], mesh: Mesh, schedule: ScheduleDecisions, limits: Limits
) -> Plan:
    """The plan of stages that a policy has placed; without any there is one, on the mesh of the plan."""
    line = OpSequence(analysis)
    parts = parts_of(line, placed) if placed else (tuple(op.name for op in analysis.graph.ops),)
    meshes = tuple(stage.mesh for stage in placed) or (mesh,)
    _check_devices(placed)
    groups = max(map(replicas, meshes))
    count = schedule.microbatches or usual_microbatches(analysis.graph, len(parts), groups)
    steps = _steps(line, parts, meshes, schedule, count)
    try:
        check_microbatches(analysis.graph, count, 1, False)
        for axes in dict.fromkeys(mesh.axes for mesh in meshes):
            _check_axes(axes, parts, meshes, limits)
        staged = StagedOps(
            parts=parts,
            meshes=meshes,
            microbatches=count,
            schedule="custom" if schedule.is_by_hand or steps.name == "greedy" else steps.name,
            steps=steps.to_json() if schedule.is_by_hand or steps.name == "greedy" else None,
        )
        plan = assemble(analysis, staged, lambda builder, names: _decide_all(builder, limits, names))
    except PlanError as error:
        raise _with_sources(error, schedule.sources if "microbatches" in str(error) else ()) from None
    check_decided(analysis, plan.stages, limits)
    return with_storage_notes(plan, analysis, limits)


def with_storage_notes(plan: Plan, analysis: Analysis, limits: Limits) -> Plan:
    """A plan that says which parameters have nothing to shard along the axis that they are to be stored over."""
    choices, notes = plan.choices(analysis.graph.entry), list(plan.notes)
    meshes = {name: stage.mesh for stage in plan.stages for name in stage.choices}
    for parameter in analysis.graph.parameters:
        axis = limits.storing[parameter.key].on if parameter.key in limits.storing else None
        placements = [
            analysis.signatures[op.name].layouts(choices.get(op.name, {}), meshes[op.name])[0][at].placement(axis)
            for op, at in analysis.graph.users[parameter.value]
            if axis is not None and op.name in meshes and axis in meshes[op.name].names
        ]
        if axis is not None and parameter.trainable and REPLICATE not in placements:
            notes.append(f"{parameter.key} is not stored over {axis}: its gradient is not summed over that axis")
    return replace(plan, notes=tuple(notes))


def _with_sources(error: PlanError, sources: Sequence[ConstraintSource]) -> PlanError:
    return PlanError(f"{'; '.join(map(str, sources))}: {error}") if sources else error


def parts_of(line: OpSequence, placed: Sequence[StagePlacement]) -> tuple[tuple[str, ...], ...]:
    """All ops by stage: those that are placed where they are placed, others with what they read."""
    known: dict[str, int] = {}
    for number, stage in enumerate(placed):
        for name in stage.names:
            other = known.setdefault(name, number)
            if other != number:
                raise PlanError(f"{stage.source}: {name} is placed already by {placed[other].source}; place it once")
    parts = parts_like(line, known, len(placed))
    raise_all(PlanError, "the stages can't be as they are placed:", list(_misplaced(line, parts, known, placed)))
    return parts


def _misplaced(
    line: OpSequence, parts: Sequence[Sequence[str]], known: dict[str, int], placed: Sequence[StagePlacement]
) -> Iterator[str]:
    stage_of = {name: number for number, part in enumerate(parts) for name in part}
    for op in line.ops:
        if stage_of[op.name] != known.get(op.name, stage_of[op.name]):
            yield (
                f"{placed[known[op.name]].source}: {op} reads what stage {stage_of[op.name]} makes, which comes later; "
                "place modules in the order in which data goes through them"
            )
    for number, part in enumerate(parts):
        if not any(name in line.place for name in part):
            yield f"{placed[number].source}: nothing is left for stage {number} to run; leave it out"
    regions: dict[str, int] = {}
    for op in line.ops:
        if op.region is not None and regions.setdefault(op.region, stage_of[op.name]) != stage_of[op.name]:
            source = placed[stage_of[op.name]].source
            yield f"{source}: {op} is in a region that the model checkpoints, with ops of another stage; cut around it"
            regions[op.region] = stage_of[op.name]


def _check_devices(placed: Sequence[StagePlacement]) -> None:
    """Stages share all of their devices, in one mesh, or none."""
    faults: list[str] = []
    meshes: dict[int, StagePlacement] = {}
    for stage in placed:
        others = {meshes[device].mesh: meshes[device] for device in stage.mesh.devices if device in meshes}
        for mesh, other in others.items():
            if mesh != stage.mesh:
                faults.append(
                    f"{stage.source}: its devices are in the mesh {stage.mesh}, and by {other.source} in {mesh}; "
                    "stages share all devices and their mesh, or none"
                )
        meshes |= dict.fromkeys(stage.mesh.devices, stage)
    if meshes and sorted(meshes) != list(range(len(meshes))):
        faults.append(
            f"{placed[-1].source}: devices are numbered from 0 on, each is in a stage, and these are "
            f"{', '.join(map(str, sorted(meshes)))}"
        )
    raise_all(PlanError, "the stages can't be as they are placed:", faults)


def _check_axes(
    axes: tuple[Axis, ...], parts: Sequence[Sequence[str]], meshes: Sequence[Mesh], limits: Limits
) -> None:
    """Refuse a split of an op along an axis that its stage does not have."""
    names = {axis.name for axis in axes}
    for part, mesh in zip(parts, meshes, strict=True):
        for name in part if mesh.axes == axes else ():
            for demand in limits.demands.get(name, ()):
                if demand.axis is not None and demand.axis not in names:
                    raise PlanError(
                        f"{' and '.join(limits.why[name])}: {name} is in a stage on {mesh}, which has no axis "
                        f"{demand.axis!r}; give the stage that axis, or select fewer ops"
                    )


def _steps(
    line: OpSequence,
    parts: Sequence[Sequence[str]],
    meshes: Sequence[Mesh],
    decisions: ScheduleDecisions,
    microbatches: int,
) -> Schedule:
    """The schedule: a known one, or by hand, or the one that suits these stages."""
    try:
        edges = tuple(split_graph(line, parts).edges)
        schedule = _base(meshes, decisions, microbatches, edges)
        if decisions.pairs:
            schedule = reordered(check(schedule, edges), decisions.pairs, edges, "custom")
        return check(schedule, edges)
    except ScheduleError as error:
        where = "; ".join(map(str, decisions.sources)) or "the stages"
        raise PlanError(f"{where}: {error}") from None


def _base(
    meshes: Sequence[Mesh], decisions: ScheduleDecisions, microbatches: int, edges: Sequence[tuple[int, int]]
) -> Schedule:
    holders = tuple(tuple(sorted(mesh.devices)) for mesh in meshes)
    ranks = list(dict.fromkeys(mesh.devices for mesh in meshes))
    if decisions.steps:
        if len(decisions.steps) != len(ranks):
            raise ScheduleError(
                f"it lists the steps of {len(decisions.steps)} pipeline ranks, and stages are on {len(ranks)}"
            )
        own = {rank: tuple(map(Step.parse, row.split())) for rank, row in zip(ranks, decisions.steps, strict=True)}
        rows = {device: row for rank, row in own.items() for device in rank}
        devices = tuple(rows[device] for device in range(len(rows)))
        return Schedule(devices=devices, holders=holders, microbatches=microbatches, name="custom")
    if decisions.kind is None and len(ranks) < len(holders):
        return greedy(holders, microbatches, [UNIT] * len(holders), edges, kinds="FB")
    kind = USUAL if decisions.kind is None else schedule_kind(decisions.kind)
    schedule = spread(kind.make(len(ranks), microbatches), ranks)
    if schedule.holders != holders:
        raise ScheduleError(
            f"{kind.name} has {kind.stages_per_rank} stages on each pipeline rank, in the order {schedule.holders}, "
            f"and here stages are on {holders}; place them as it wants them, or name another schedule"
        )
    return replace(schedule, name=kind.name)


__all__ = ["ScheduleDecisions", "StagePlacement", "build_flat", "build_stages", "parts_of"]

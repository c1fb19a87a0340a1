"""What the verbs of a policy have decided, and the same as constraints on a search for the rest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ..errors import PlanError
from ..layout import MOST_DEVICES
from ..rules import Analysis
from .constraint_kinds import (
    AxisConstraint,
    ChoiceConstraint,
    ChoiceDemand,
    ChunkedLossConstraint,
    Constraint,
    Constraints,
    ConstraintSource,
    DevicesConstraint,
    PipelineConstraint,
    Range,
    RecomputeConstraint,
    SameSplitConstraint,
    StageCutConstraint,
    Target,
    ZeroConstraint,
)
from .constraints import AXIS
from .hand_plan import ScheduleDecisions, StagePlacement, parts_of
from .stages import OpSequence

AxisSize = int | tuple[int, int] | None
"""The size of an axis: a number, (least, most), or None: any."""


@dataclass(kw_only=True)
class PolicyDecisions:
    """Grows with every verb.

    axes      of the mesh, with their sizes
    choices   of ops, by their name and an axis: the last word counts
    storing   of parameters, by key
    recompute  of modules, by path
    chunks    of losses, by name
    stages    in their order
    source    where the mesh is made
    """

    axes: dict[str, Range]
    source: ConstraintSource
    choices: dict[tuple[str, str], tuple[ChoiceDemand, ConstraintSource]] = field(default_factory=dict)
    storing: dict[str, ZeroConstraint] = field(default_factory=dict)
    recompute: dict[str, RecomputeConstraint] = field(default_factory=dict)
    chunks: dict[str, ChunkedLossConstraint] = field(default_factory=dict)
    ties: list[SameSplitConstraint] = field(default_factory=list)
    stages: list[StagePlacement] = field(default_factory=list)
    schedule: ScheduleDecisions = field(default_factory=ScheduleDecisions)

    @property
    def names(self) -> tuple[str, ...]:
        """The axes that a verb can name: those of the plan, and of stages."""
        inside = (name for stage in self.stages for name in stage.mesh.names)
        return tuple(dict.fromkeys((*self.axes, *inside)))

    @property
    def single(self) -> frozenset[str]:
        """Axes of one device, along which nothing can be split."""
        return frozenset(name for name, size in self.axes.items() if size.exact == 1)

    def items(self) -> Iterator[Constraint]:
        """What is decided about ops and parameters, one constraint for each line."""
        by_line: dict[ConstraintSource, dict[str, tuple[ChoiceDemand, ...]]] = {}
        for (name, _), (demand, source) in self.choices.items():
            demands = by_line.setdefault(source, {})
            demands[name] = (*demands.get(name, ()), demand)
        for source, demands in by_line.items():
            yield ChoiceConstraint(demands=demands, source=source)
        yield from self.storing.values()
        yield from self.recompute.values()
        yield from self.chunks.values()
        yield from self.ties


def read_axes(axes: Mapping[str, AxisSize], source: ConstraintSource) -> dict[str, Range]:
    """The axes of a mesh as they are written: dp=2, tp=None, cp=(2, 8)."""
    ranges: dict[str, Range] = {}
    for name, size in axes.items():
        if not AXIS.fullmatch(name):
            raise PlanError(f"{source}: an axis is called dp, tp, sp, ep, tp2 or the like, not {name!r}")
        least, most = (2, MOST_DEVICES) if size is None else size if isinstance(size, tuple) else (size, size)
        if not (isinstance(least, int) and isinstance(most, int) and 1 <= least <= most <= MOST_DEVICES):
            raise PlanError(f"{source}: {size!r} is no size of {name}; it is a number of devices, (2, 8) or None")
        ranges[name] = Range(least, most)
    return ranges


def constraints_of(decisions: PolicyDecisions, analysis: Analysis) -> Constraints:
    """Constraints that leave a search nothing to decide that is decided."""
    items: list[Constraint] = list(decisions.items())
    stages, schedule, source = decisions.stages, decisions.schedule, decisions.source
    if schedule.is_by_hand:
        raise PlanError(
            f"{schedule.sources[-1]}: the search picks known schedules and can't order their steps; name one, or "
            "return build()"
        )
    axes = dict(decisions.axes)
    for stage in stages:
        if stage.mesh.axes != stages[0].mesh.axes:
            raise PlanError(f"{stage.source}: the search wants stages of one mesh; return build(), or leave it open")
        axes = {axis.name: Range(axis.size, axis.size) for axis in stage.mesh.axes}
    items += [AxisConstraint(name=name, size=size, source=source) for name, size in axes.items() if size.most > 1]
    where = schedule.sources[-1] if schedule.sources else source
    if stages:
        pp_ranks = len({stage.mesh.devices for stage in stages})  # which is what the search counts
        items.append(PipelineConstraint(what="stages", value=Range(pp_ranks, pp_ranks), source=stages[0].source))
    if schedule.microbatches is not None:
        count = Range(schedule.microbatches, schedule.microbatches)
        items.append(PipelineConstraint(what="microbatches", value=count, source=where))
    if schedule.kind is not None:
        items.append(PipelineConstraint(what="schedule", value=schedule.kind, source=where))
    items += _cuts(decisions, analysis)
    return Constraints(items=tuple(items), classes=analysis.graph.classes)


def _cuts(decisions: PolicyDecisions, analysis: Analysis) -> Iterator[Constraint]:
    """Where stages begin, and on which devices they are."""
    stages, line = decisions.stages, OpSequence(analysis)
    if not stages:
        return
    parts = parts_of(line, stages)
    stage_of = {name: number for number, part in enumerate(parts) for name in part}
    numbers = [stage_of[op.name] for op in line.ops]
    if numbers != sorted(numbers):
        at = next(at for at, (a, b) in enumerate(pairwise(numbers)) if a > b)
        raise PlanError(
            f"{stages[numbers[at]].source}: {line.ops[at + 1]} comes later in the model and is in an earlier stage; "
            "the search cuts models in their order: return build()"
        )
    for number, stage in enumerate(stages[1:], 1):
        first = line.ops[numbers.index(number)]
        yield StageCutConstraint(target=Target(ops=(first.name,)), before=True, source=stage.source)
    devices = tuple(stage.mesh.devices for stage in stages)
    order = [device for own in dict.fromkeys(devices) for device in own]
    if order != sorted(order):
        raise PlanError(
            f"{stages[-1].source}: the search lays stages out in the order of the devices, and here it is "
            f"{', '.join(map(str, order))}; return build(), or place them in that order"
        )
    yield DevicesConstraint(devices=devices, source=stages[-1].source)

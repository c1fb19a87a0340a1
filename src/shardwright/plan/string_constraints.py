"""A plan string as constraints: what it says beside a search ("auto,pp=4,tp=2"), and what only constraints can say."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import PlanError
from ..rules.replica_axes import REPLICAS
from ..storage import SHARDED_TENSORS
from .constraint_kinds import (
    AxisConstraint,
    ChunkedLossConstraint,
    Constraint,
    ConstraintSource,
    PipelineConstraint,
    Range,
    RecomputeConstraint,
    StageCutConstraint,
    Target,
    ZeroConstraint,
)
from .strings import SHARDED, PolicyRequest


def string_constraints(request: PolicyRequest, text: str) -> Iterator[Constraint]:
    """All that a plan string says, for a search for the rest."""
    source = ConstraintSource(text=text, where="the plan")
    if request.free or len(set(request.stages)) > 1:
        raise PlanError(f"{source}: beside auto stages are equal; say how many there are (pp=2), or leave auto out")
    for policy, axis in request.parts:
        if policy not in ("dp", "tp", *SHARDED):
            raise PlanError(
                f"{source}: beside auto there are dp, tp, {', '.join(SHARDED)}, pp and schedules; the search does not "
                f"know how {policy} would split ops, so leave auto out, or leave {policy} to it"
            )
        size = Range(axis.size, axis.size)
        yield AxisConstraint(name=axis.name, size=size, data=policy in REPLICAS, source=source)
        if policy in SHARDED:
            zero = Range(SHARDED_TENSORS[policy], SHARDED_TENSORS[policy])
            yield ZeroConstraint(target=Target(), zero=zero, on=axis.name, source=source)
    if request.stages:
        count = Range(len(request.stages), len(request.stages))
        yield PipelineConstraint(what="stages", value=count, source=source)
    if request.schedule is not None:
        yield PipelineConstraint(what="schedule", value=request.schedule.name, source=source)
    if request.recompute:
        raise PlanError(f"{source}: beside auto, name what is recomputed (recompute=layers.*), or leave it open")
    if request.chunked_loss is not None:
        yield ChunkedLossConstraint(target=Target(), chunks=request.chunked_loss or None, source=source)
    yield from module_constraints(request, source)


def module_constraints(request: PolicyRequest, source: ConstraintSource | None = None) -> Iterator[Constraint]:
    """What a plan string says of modules."""
    source = source or ConstraintSource(text=str(request), where="the plan")
    if request.cuts:
        yield StageCutConstraint(target=Target(modules=request.cuts), before=True, source=source)
    if request.recomputed:
        yield RecomputeConstraint(target=Target(modules=request.recomputed), wanted=True, source=source)

"""What the user asks of a pipeline, and the errors where that is impossible."""

from __future__ import annotations

from ...errors import PlanError
from ...rules.replica_axes import is_replica
from ...schedule import schedule_kind
from ..clash import format_bytes
from ..limits import Limits
from ..pipeline import check_microbatches
from ..search_options import SearchOptions
from .search import PipelineSearch
from .setup import PipelineRequest


def pipeline_request(limits: Limits, options: SearchOptions) -> PipelineRequest:
    """What constraints and arguments ask of stages, microbatches and the schedule."""
    constraints = limits.pipeline
    count = constraints.get("microbatches", options.microbatches)
    if options.microbatches not in (None, count):
        raise PlanError(
            f"PipelineOptions(microbatches={options.microbatches}), but a constraint asks for {count}; leave one of "
            "them out"
        )
    stages, schedule = constraints.get("stages"), constraints.get("schedule")
    return PipelineRequest(
        stages=None if stages is None else int(stages),
        microbatches=None if count is None else int(count),
        schedule=None if schedule is None else schedule_kind(str(schedule)),
    )


def needs_pipeline(request: PipelineRequest, limits: Limits) -> bool:
    """Whether a flat plan can't meet the request."""
    return (request.stages or 1) > 1 or (request.microbatches or 1) > 1 or bool(limits.pivots)


def axes_of(limits: Limits) -> tuple[str, str]:
    """The names of the two axes of a pipeline rank: those that the user named, else x and y, renamed later by use."""
    data = [name for name, demands in limits.axes.items() if is_replica(name) or any(demand.data for demand in demands)]
    inner = [name for name in limits.axes if name not in data]
    if len(data) > 1 or len(inner) > 1:
        return "x", "y"  # no pipeline rank has all of them
    return (data or ["x"])[0], (inner or ["y"])[0]


def check_pipeline_request(search: PipelineSearch) -> None:
    """Refuse an impossible request, with the numbers that clash."""
    request, blocks, setup = search.setup.request, search.blocks, search.setup
    graph = setup.analysis.graph
    least = len(blocks.pivots) + 1
    if request.stages is not None and request.stages > setup.size:
        raise PlanError(
            f"{request.stages} stages are asked for, and there are {setup.size} devices; use {setup.size} at most"
        )
    if request.stages is not None and request.stages > blocks.count:
        most = f"in {blocks.count} at most; use fewer" if blocks.count > 1 else "nowhere; use 1"
        raise PlanError(f"{request.stages} stages are asked for, and {graph.name} can be cut {most}")
    if request.stages is not None and request.stages < least and request.schedule is None:
        raise PlanError(
            f"{request.stages} stages are asked for, and {least - 1} modules that a stage begins with; ask for {least}"
        )
    count = request.microbatches or 1
    if count > 1 and not setup.local:
        if search.fault is not None:
            raise PlanError(
                f'{count} microbatches are asked for, but {search.fault}; use 1, or pipeline.semantics="local", '
                "which makes each of them a batch of its own"
            )
        check_microbatches(graph, count, 1, False)


def nothing_found(search: PipelineSearch) -> PlanError:
    """The error if nothing that meets the request fits."""
    request, setup = search.setup.request, search.setup
    demands = [
        f"{value} {name}"
        for name, value in (("stages", request.stages), ("microbatches", request.microbatches))
        if value
    ]
    demands += [f"the schedule {request.schedule.name}"] if request.schedule else []
    conditions = f" with {' and '.join(demands)}" if demands else ""
    rooms = format_bytes(setup.room(search.single_device()))
    graph = setup.analysis.graph
    return PlanError(
        f"no pipeline{conditions} was found that fits {graph.name} with a batch of {graph.batch} on "
        f"{setup.size} devices of {setup.cluster} with {rooms} each; ask for less, use more devices or a smaller batch"
    )

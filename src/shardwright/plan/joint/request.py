"""What people ask of a pipeline, and what to say where it can't be."""

from __future__ import annotations

from ...errors import PlanError
from ..auto import SearchOptions
from ..clash import format_bytes
from ..limits import Limits
from ..pipeline import check_microbatches
from ..replica_axes import is_replica
from .search import PipelineSearch
from .setup import PipelineRequest


def pipeline_request(limits: Limits, options: SearchOptions) -> PipelineRequest:
    """What constraints and arguments say of stages, microbatches and the schedule."""
    said = limits.pipeline
    count = said.get("microbatches", options.microbatches)
    if options.microbatches not in (None, count):
        raise PlanError(
            f"microbatches={options.microbatches}, but a constraint asks for {count}; leave one of them out"
        )
    stages, schedule = said.get("stages"), said.get("schedule")
    return PipelineRequest(
        stages=None if stages is None else int(stages),
        microbatches=None if count is None else int(count),
        schedule=None if schedule is None else str(schedule),
    )


def needs_pipeline(asked: PipelineRequest, limits: Limits) -> bool:
    """Whether a flat plan would not do."""
    return (asked.stages or 1) > 1 or (asked.microbatches or 1) > 1 or bool(limits.pivots)


def axes_of(limits: Limits) -> tuple[str, str]:
    """The names of the two axes of a seat: those that people have named, else such as are named by what they do."""
    data = [name for name, held in limits.axes.items() if is_replica(name) or any(one.data for one in held)]
    inner = [name for name in limits.axes if name not in data]
    if len(data) > 1 or len(inner) > 1:
        return "x", "y"  # no seat has all of them
    return (data or ["x"])[0], (inner or ["y"])[0]


def check_pipeline_request(search: PipelineSearch) -> None:
    """Refuse what can't be, with the numbers that clash."""
    asked, blocks, setup = search.setup.asked, search.blocks, search.setup
    graph = setup.analysis.graph
    least = len(blocks.pivots) + 1
    if asked.stages is not None and asked.stages > setup.size:
        raise PlanError(
            f"{asked.stages} stages are asked for, and there are {setup.size} devices; use {setup.size} at most"
        )
    if asked.stages is not None and asked.stages > blocks.count:
        most = f"in {blocks.count} at most; use fewer" if blocks.count > 1 else "nowhere; use 1"
        raise PlanError(f"{asked.stages} stages are asked for, and {graph.name} can be cut {most}")
    if asked.stages is not None and asked.stages < least and asked.schedule is None:
        raise PlanError(
            f"{asked.stages} stages are asked for, and {least - 1} modules that a stage begins with; ask for {least}"
        )
    count = asked.microbatches or 1
    if count > 1 and not setup.local:
        if search.fault is not None:
            raise PlanError(
                f'{count} microbatches are asked for, but {search.fault}; use 1, or microbatch_semantics="local", '
                "which makes each of them a batch of its own"
            )
        check_microbatches(graph, count, 1, False)


def nothing_found(search: PipelineSearch) -> PlanError:
    """Nothing that keeps to what is asked fits."""
    asked, setup = search.setup.asked, search.setup
    words = [
        f"{value} {name}" for name, value in (("stages", asked.stages), ("microbatches", asked.microbatches)) if value
    ]
    words += [f"the schedule {asked.schedule}"] if asked.schedule else []
    what = f" with {' and '.join(words)}" if words else ""
    rooms = format_bytes(setup.room(search.any_seat()))
    graph = setup.analysis.graph
    return PlanError(
        f"no pipeline{what} was found that fits {graph.name} with a batch of {graph.batch} on "
        f"{setup.size} devices of {setup.cluster} with {rooms} each; ask for less, use more devices or a smaller batch"
    )

"""A plan for a graph, flat or as a pipeline, whichever is faster.

A flat plan is searched first (`plan.auto`); a pipeline has to be faster, or the flat plan must not fit. The best
pipelines are solved stage by stage (`solved_stages`), and a memory simulation says whether they fit; what it finds
beyond the sums is reserved, and they are solved again.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...errors import PlanError
from ...memory import MemoryPeak
from ...rules import Analysis
from ...rules.replica_axes import is_replica
from ...schedule import schedule_kind
from ..auto import NothingFits, SearchResult
from ..auto import search as search_flat
from ..binder import bind
from ..clash import format_bytes
from ..constraint_kinds import Range
from ..context import SearchContext
from ..limits import Limits
from ..pipeline import check_microbatches
from ..plan import Plan
from ..search_options import SearchOptions
from .candidates import PipelineTrial
from .ranks import PipelineRequest, PipelineSetup, RankDevices
from .search import PipelineSearch, PipelineSearchResult
from .solved_stages import Refiner, SolvedPipeline, SolvedStage


def pipeline_request(limits: Limits, options: SearchOptions) -> PipelineRequest:
    """What constraints and arguments ask of stages, microbatches and the schedule."""
    count = limits.count("microbatches")
    if options.microbatches is not None:
        if count is not None and options.microbatches not in count:
            raise PlanError(
                f"PipelineOptions(microbatches={options.microbatches}), but a constraint asks for {count}; leave one "
                "of them out"
            )
        count = Range(options.microbatches, options.microbatches)
    schedule = limits.schedule
    return PipelineRequest(
        stages=limits.count("stages"),
        microbatches=count,
        schedule=None if schedule is None else schedule_kind(schedule),
    )


def needs_pipeline(request: PipelineRequest, limits: Limits) -> bool:
    """Whether a flat plan can't meet the request."""
    several = any(count is not None and count.least > 1 for count in (request.stages, request.microbatches))
    return several or bool(limits.pivots) or len(limits.devices) > 1


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
    placed = {device for devices in setup.limits.devices for device in devices}
    if placed and len(placed) != setup.size:
        raise PlanError(f"stages are placed on {len(placed)} devices, and there are {setup.size}; place some on each")
    stages = request.stages
    if stages is not None and stages.least > setup.size:
        raise PlanError(
            f"{stages} stages are asked for, and there are {setup.size} devices; use {setup.size} at most"
        )
    if stages is not None and stages.least > blocks.count:
        most = f"in {blocks.count} at most; use fewer" if blocks.count > 1 else "nowhere; use 1"
        raise PlanError(f"{stages} stages are asked for, and {graph.name} can be cut {most}")
    if stages is not None and stages.most < least and request.schedule is None:
        raise PlanError(
            f"{stages} stages are asked for, and {least - 1} modules that a stage begins with; ask for {least}"
        )
    count = request.microbatches.least if request.microbatches is not None else 1
    if count > 1 and not setup.local:
        if search.fault is not None:
            raise PlanError(
                f'{count} microbatches are asked for, but {search.fault}; use 1, or pipeline.semantics="local", '
                "which makes each of them a batch of its own"
            )
        if request.microbatches is not None and request.microbatches.exact is not None:
            check_microbatches(graph, count, 1, False)


def nothing_found(search: PipelineSearch) -> PlanError:
    """The error if nothing that meets the request fits."""
    request, setup = search.setup.request, search.setup
    demands = [
        f"{value} {name}"
        for name, value in (("stages", request.stages), ("microbatches", request.microbatches))
        if value is not None
    ]
    demands += [f"the schedule {request.schedule.name}"] if request.schedule else []
    demands += [f"stages on the devices {limits.devices}"] if (limits := setup.limits).devices else []
    conditions = f" with {' and '.join(demands)}" if demands else ""
    rooms = format_bytes(setup.room(search.single_device()))
    graph = setup.analysis.graph
    return PlanError(
        f"no pipeline{conditions} was found that fits {graph.name} with a batch of {graph.batch} on "
        f"{setup.size} devices of {setup.cluster} with {rooms} each; ask for less, use more devices or a smaller batch"
    )


ATTEMPTS = 4
"""How often a pipeline is solved until it fits: its transient memory is known only once it is solved."""

LEFT_OUT = (
    "the search: in a pipeline the outer axis of a stage splits the batch and nothing else, and the inner one lies "
    "inside of a node",
    "the search: pipelines are cut into stages by estimates of their step; the gap counts what that may lose",
)

MOST_SOLVED = 4
"""The most trials that are solved, the most promising first."""


@dataclass(frozen=True, kw_only=True)
class PipelineResult:
    """A pipeline that was solved and whose memory was simulated."""

    solved: SolvedPipeline
    memory: tuple[MemoryPeak, ...]  # of each pipeline rank
    piped: PipelineSearchResult
    rooms: tuple[float, ...]  # the memory limit of a device of each pipeline rank

    def room(self, pp_rank: int) -> float:
        return self.rooms[pp_rank]

    @property
    def trial(self) -> PipelineTrial:
        return self.solved.trial


@dataclass(frozen=True, kw_only=True)
class JointResult:
    """The plan, and what both searches found.

    flat_bound    no plan without a pipeline that fits takes less
    """

    plan: Plan
    flat: SearchResult | None
    pipeline: PipelineResult | None
    piped: PipelineSearchResult | None
    flat_bound: float = math.inf

    @property
    def seconds(self) -> float:
        """The step time of the plan."""
        if self.pipeline is not None:
            return self.pipeline.trial.seconds
        assert self.flat is not None
        return self.flat.best.time

    @property
    def bound(self) -> float:
        """Nothing that was searched takes less, with a pipeline or without."""
        return min(self.seconds, self.flat_bound, math.inf if self.piped is None else self.piped.bound)


class JointPlanner:
    """Solves the trials of a search over pipelines."""

    def __init__(self, setup: PipelineSetup) -> None:
        self.setup, self.search = setup, PipelineSearch(setup)
        self.refiner = Refiner(self.search.fronts.where, setup.stop)

    def run(self) -> PipelineResult | None:
        piped = self.search.run()
        self.piped = piped
        trials = [] if piped.best is None else [piped.best, *piped.others]
        best: PipelineResult | None = None
        for number, trial in enumerate(trials):
            upper = min(self.setup.upper, math.inf if best is None else best.trial.seconds)
            if (number >= MOST_SOLVED and best is not None) or trial.seconds >= upper * (1.0 - self.setup.slack):
                break
            if best is not None and self.setup.stop():
                break
            result = self.solved(trial, piped)
            if result is not None and result.trial.seconds < upper:
                best = result
            self.setup.progress(f"solved {trial}", math.inf if best is None else best.trial.seconds)
        return best

    def solved(self, trial: PipelineTrial, piped: PipelineSearchResult) -> PipelineResult | None:
        """A trial solved such that its simulated memory fits; None if no such solution was found."""
        refiner = self.refiner
        over = [self.search.reserve] * len(trial.pp_ranks)
        for _ in range(ATTEMPTS):
            stages = self._stages(trial, refiner, over)
            if stages is None:
                return None
            again = self.search.timed_trial(
                trial.pp_ranks, trial.microbatches, trial.schedule, [solved.stage for solved in stages], trial.mixes,
                trial.bounds,
            )  # fmt: skip
            pipeline = SolvedPipeline(
                trial=again,
                solved=tuple(stages),
                line=self.search.line,
                places=self.search.blocks.places,
                local=self.setup.local,
            )
            memory = pipeline.memory(self.setup.cluster, self.setup.training)
            more = [peak.peak - self.setup.room(pp_rank) for peak, pp_rank in zip(memory, trial.pp_ranks, strict=True)]
            if max(more) <= 0:
                rooms = tuple(self.setup.room(pp_rank) for pp_rank in trial.pp_ranks)
                return PipelineResult(solved=pipeline, memory=memory, piped=piped, rooms=rooms)
            over = [
                max(old, peak.peak - again.memory(pp_rank)) * 1.01 if more[pp_rank] > 0 else old
                for pp_rank, (old, peak) in enumerate(zip(over, memory, strict=True))
            ]
        return None

    def _stages(self, trial: PipelineTrial, refiner: Refiner, over: Sequence[float]) -> list[SolvedStage] | None:
        stages = []
        flight = trial.schedule.in_flight(len(trial.pp_ranks), trial.microbatches)
        for part, pp_rank in enumerate(trial.holders):
            own = trial.stages_of(pp_rank)
            share = round(trial.parts[part].memory(flight[pp_rank] / len(own)) / max(trial.memory(pp_rank), 1.0), 2)
            room = (self.setup.room(trial.pp_ranks[pp_rank]) - over[pp_rank]) * (share if len(own) > 1 else 1.0)
            front = self.search.fronts.of(trial.pp_ranks[pp_rank], trial.microbatches)
            assert front is not None
            begin, end = trial.bounds[part], trial.bounds[part + 1]
            solved = refiner.solve(front, begin, end, flight[pp_rank] / len(own), room)
            if solved is None:
                return None
            stages.append(solved)
        return stages


def find_plan(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    options: SearchOptions,
    *,
    size: int | None = None,
) -> JointResult:
    """The best plan for a graph on a cluster, flat or as a pipeline."""
    began = time.monotonic()
    limits = bind(options.constraints, analysis, options.chunked)
    request = pipeline_request(limits, options)
    only = needs_pipeline(request, limits)
    context = SearchContext(analysis, cluster, training, limits, recompute=options.recompute)
    flat: SearchResult | None = None
    fault: NothingFits | None = None
    try:
        flat = None if only else search_flat(analysis, cluster, training, options, size=size, like=context)
    except NothingFits as error:
        fault = error
    trained = analysis.graph.entry.startswith("train")
    flat_only = request.stages == Range(1, 1) or options.data_only or not options.pipelines or not analysis.live
    if not trained or (flat_only and not only):
        return _flat(flat, None, fault, None)

    def late() -> bool:
        stopped = options.stop is not None and options.stop()
        return stopped or time.monotonic() - began > options.seconds

    upper = options.upper if flat is None else flat.best.time
    setup = PipelineSetup(
        analysis=analysis,
        cluster=cluster,
        training=training,
        limits=limits,
        size=size or cluster.size,
        room=_room(cluster, training, options, limits.memory),
        recompute=options.recompute,
        local=options.local,
        names=axes_of(limits),
        request=request,
        context=context,
        slack=options.slack,
        upper=upper,
        stop=late,
        progress=lambda what, best: options.report(what, min(best, upper)),
    )
    planner = JointPlanner(setup)
    check_pipeline_request(planner.search)
    result = planner.run()
    if result is None:
        return _flat(flat, planner.piped, fault, planner.search)
    notes = [f"keeps to {item.source}" for item in options.constraints.items]
    plan = result.solved.plan(cluster, [*notes, *LEFT_OUT])
    return JointResult(plan=plan, flat=flat, pipeline=result, piped=planner.piped, flat_bound=_flat_bound(flat, fault))


def _flat_bound(flat: SearchResult | None, fault: NothingFits | None) -> float:
    if flat is not None:
        return flat.bound
    return fault.bound if fault is not None else math.inf


def _flat(
    flat: SearchResult | None,
    piped: PipelineSearchResult | None,
    fault: NothingFits | None,
    search: PipelineSearch | None,
) -> JointResult:
    """The flat plan, as there is no pipeline; else the error that says why there is none either."""
    if flat is not None:
        return JointResult(plan=flat.plan, flat=flat, pipeline=None, piped=piped, flat_bound=flat.bound)
    if fault is not None:
        raise fault
    assert search is not None
    raise nothing_found(search)


def _room(
    cluster: Cluster, training: TrainingSetup, options: SearchOptions, memory: float
) -> Callable[[RankDevices], float]:
    def room(pp_rank: RankDevices) -> float:
        device = min(cluster.device(rank).memory for rank in (pp_rank.devices[0], pp_rank.devices[-1]))
        return min(memory, training.room(device) if options.memory is None else options.memory)

    return room


__all__ = ["JointResult", "PipelineResult", "find_plan"]

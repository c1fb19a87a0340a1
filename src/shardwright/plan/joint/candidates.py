"""The pipelines tried: pipeline ranks, microbatches and schedules.

A `PipelineCandidate` has a lower bound on its step time. A `PipelineTrial` is one that was cut into stages and
simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ...schedule import USUAL, ScheduleKind, SimulatedRun, StageEdge, StageTimes, searched_kinds, simulate
from .bounds import bound_of
from .pareto_front import StageSolution
from .ranks import PipelineSetup, RankDevices, place_ranks, rank_assignments
from .stage_costs import Alike, StageCost, StageFronts
from .stage_cuts import Blocks

Mix = tuple[tuple[StageSolution, float], ...]
"""Solutions, and the share of each."""

LONG = 6
"""Microbatches per stage that are simulated; each of the rest takes as long as the slowest rank needs for one."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """One pipeline.

    parts      the stage of each stage, in the order of the graph
    bounds     the blocks at which stages begin, and the end
    links      seconds that a microbatch's values take to enter each stage but the first
    """

    pp_ranks: tuple[RankDevices, ...]
    microbatches: int
    schedule: ScheduleKind
    parts: tuple[StageCost, ...]
    mixes: tuple[Mix, ...]
    bounds: tuple[int, ...]
    links: tuple[float, ...]
    seconds: float
    once: float  # of it, after the schedule
    bubble: float

    @property
    def holders(self) -> tuple[int, ...]:
        """The pipeline rank of each stage."""
        return tuple(pp_rank for (pp_rank,) in self.schedule.holders(len(self.pp_ranks)))

    def stages_of(self, pp_rank: int) -> list[int]:
        """The stages of a pipeline rank."""
        return [part for part, holder in enumerate(self.holders) if holder == pp_rank]

    @property
    def busy(self) -> tuple[float, ...]:
        """Compute seconds of a microbatch on each pipeline rank."""
        return tuple(
            sum(self.parts[part].forward + self.parts[part].backward for part in self.stages_of(pp_rank))
            for pp_rank in range(len(self.pp_ranks))
        )

    @property
    def balance(self) -> float:
        """How much longer the slowest pipeline rank computes than the mean."""
        return max(self.busy) * len(self.busy) / sum(self.busy)

    def memory(self, pp_rank: int) -> float:
        """Bytes stored or saved for backward on a device of a pipeline rank."""
        flight = self.schedule.in_flight(len(self.pp_ranks), self.microbatches)[pp_rank]
        own = [self.parts[part] for part in self.stages_of(pp_rank)]
        return sum(part.stored + flight / len(own) * part.saved for part in own)

    def __str__(self) -> str:
        return self.describe({})

    def describe(self, names: Mapping[str, str]) -> str:
        """As text, with axes under these names."""
        first = self.pp_ranks[0]
        sizes = zip(first.names, (first.data, first.inner), strict=True)
        inside = " x ".join(f"{names.get(name, name)}={size}" for name, size in sizes if size > 1)
        counts = [len(pp_rank.devices) for pp_rank in self.pp_ranks]
        alike = f"of {counts[0]}" if len(set(counts)) == 1 else f"of {'+'.join(map(str, counts))}"
        parts = f"{self.microbatches} microbatches" if self.microbatches > 1 else "no microbatches"
        if len(self.pp_ranks) == 1:
            return f"gradient accumulation over {parts}{f' ({inside})' if inside else ''}"
        stages = f"{len(self.pp_ranks)} stages {alike}{f' ({inside})' if inside else ''}"
        return f"{stages}, {parts}, {self.schedule.name}"


def run_of(
    schedule: ScheduleKind, pp_ranks: int, microbatches: int, parts: Sequence[StageCost], links: Sequence[float]
) -> tuple[SimulatedRun, float]:
    """The simulated run of a schedule, and its seconds for all microbatches."""
    some = min(microbatches, max(LONG * pp_ranks * schedule.stages_per_rank, 32))
    apart = schedule.splits_backward
    times = [
        StageTimes(part.forward, part.backward - part.weight if apart else part.backward, part.weight if apart else 0.0)
        for part in parts
    ]
    edges = [StageEdge(at, at + 1, link, link) for at, link in enumerate(links)]
    run = simulate(schedule.make(pp_ranks, some), times, edges)
    holders = schedule.holders(pp_ranks)
    busy = [0.0] * pp_ranks
    for part, (pp_rank,) in zip(parts, holders, strict=True):
        busy[pp_rank] += part.forward + part.backward
    return run, run.total + (microbatches - some) * max(busy)


MOST_COUNTS = 8
"""Numbers of microbatches tried for one choice of pipeline ranks."""


@dataclass(frozen=True, eq=False, slots=True)
class PipelineCandidate:
    """A pipeline whose cuts are still open. Whatever they are, a step takes at least `bound` seconds; the bound is
    rough until `sure`.

    alike     the pipeline ranks of each kind
    within    the bound takes memory into account
    """

    bound: float
    pp_ranks: tuple[RankDevices, ...]
    alike: Alike
    microbatches: int
    schedule: ScheduleKind
    within: bool = False
    sure: bool = False


def for_each(
    pp_ranks: Sequence[RankDevices], alike: Alike, measure: Callable[[RankDevices, int], float], microbatches: int
) -> list[float]:
    """A number for each pipeline rank, measured once per kind."""
    values = [0.0] * len(pp_ranks)
    for numbers in alike:
        value = measure(pp_ranks[numbers[0]], microbatches)
        for number in numbers:
            values[number] = value
    return values


class PipelineCandidates:
    """All candidates of a setup. `can_split_batch`: whether the batch may be split into microbatches."""

    def __init__(self, setup: PipelineSetup, blocks: Blocks, fronts: StageFronts, *, can_split_batch: bool) -> None:
        self.setup, self.blocks, self.fronts, self.can_split_batch = setup, blocks, fronts, can_split_batch
        self.batch = setup.analysis.graph.batch or 1

    def __iter__(self) -> Iterator[PipelineCandidate]:
        request = self.setup.request
        for runs in rank_assignments(self.setup.cluster, self.setup.size):
            stages = sum(count for count, _, _ in runs)
            if stages > self.blocks.count or (request.stages is not None and stages not in request.stages):
                continue
            for pp_ranks in place_ranks(runs, self.setup.cluster, self.setup.names):
                if all(self._has_axes(pp_rank) for pp_rank in dict.fromkeys(pp_ranks)):
                    yield from self._on(pp_ranks)
            if self.setup.stop():
                return

    def _on(self, pp_ranks: tuple[RankDevices, ...]) -> Iterator[PipelineCandidate]:
        alike = self.fronts.alike(pp_ranks)
        for microbatches in self.counts(pp_ranks):
            alone = for_each(pp_ranks, alike, self.fronts.rough, microbatches)
            after = for_each(pp_ranks, alike, self.fronts.after, microbatches)
            for schedule in self._schedules(len(pp_ranks), microbatches):
                if not self._are_wanted(pp_ranks, schedule):
                    continue
                bound = bound_of(alone, microbatches, schedule.fill, after)
                yield PipelineCandidate(bound, pp_ranks, alike, microbatches, schedule)

    def by_now(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with a bound from what larger microbatches are known to take by now."""
        return self._bounded(candidate, self.fronts.rough)

    def sure(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with a bound computed for its own microbatch size."""
        return replace(self._bounded(candidate, self.fronts.quick), sure=True)

    def _bounded(self, candidate: PipelineCandidate, measure: Callable[[RankDevices, int], float]) -> PipelineCandidate:
        pp_ranks, alike, microbatches = candidate.pp_ranks, candidate.alike, candidate.microbatches
        alone = for_each(pp_ranks, alike, measure, microbatches)
        after = for_each(pp_ranks, alike, self.fronts.after, microbatches)
        bound = bound_of(alone, microbatches, candidate.schedule.fill, after)
        return replace(candidate, bound=max(bound, candidate.bound))

    def _has_axes(self, pp_rank: RankDevices) -> bool:
        """Whether a pipeline rank has the axes that the user named, in their sizes."""
        sizes = dict(zip(pp_rank.names, (pp_rank.data, pp_rank.inner), strict=True))
        return all(
            sizes.get(name, 1) > 1 and all(demand.size is None or sizes[name] in demand.size for demand in demands)
            for name, demands in self.setup.limits.axes.items()
        )

    def _schedules(self, pp_ranks: int, microbatches: int) -> Iterator[ScheduleKind]:
        requested = self.setup.request.schedule
        if pp_ranks == 1:
            yield requested or USUAL
            return
        for schedule in (requested,) if requested is not None else searched_kinds():
            each = schedule.stages_per_rank
            if pp_ranks * each <= self.blocks.count and (each == 1 or microbatches >= pp_ranks):
                yield schedule

    def _are_wanted(self, pp_ranks: Sequence[RankDevices], schedule: ScheduleKind) -> bool:
        """Whether the stages are on the devices that a policy has placed them on, if it has."""
        wanted = self.setup.limits.devices
        return not wanted or wanted == tuple(pp_ranks[at].devices for (at,) in schedule.holders(len(pp_ranks)))

    def counts(self, pp_ranks: Sequence[RankDevices]) -> list[int]:
        """Numbers of microbatches that divide the batch on all pipeline ranks."""
        requested = self.setup.request.microbatches
        if any(self.batch % pp_rank.data for pp_rank in pp_ranks):
            return []
        if self.setup.local:
            return [requested.least if requested is not None else 1]
        samples = math.gcd(*(self.batch // pp_rank.data for pp_rank in pp_ranks))
        fitting = [count for count in range(1, samples + 1) if samples % count == 0] if self.can_split_batch else [1]
        if requested is not None:
            return [count for count in fitting if count in requested]
        if len(pp_ranks) == 1:
            fitting = fitting[1:]  # without microbatches it is a flat plan, which another search covers
        if len(fitting) <= MOST_COUNTS:
            return fitting
        wanted = [len(pp_ranks) * 2.0**power for power in range(-1, MOST_COUNTS - 2)]
        near = {min(fitting, key=lambda count: abs(math.log(count / goal))) for goal in wanted}
        return sorted({*near, fitting[-1]})

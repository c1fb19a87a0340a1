"""The pipelines tried: pipeline ranks, microbatches and schedules, each with a lower bound on its step time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...schedule import USUAL, ScheduleKind, searched_kinds
from .blocks import Blocks
from .bounds import bound_of
from .fronts import Alike, StageFronts
from .ranks import RankDevices, place_ranks, rank_assignments
from .setup import PipelineSetup

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
            if stages > self.blocks.count or request.stages not in (None, stages):
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
            sizes.get(name, 1) > 1 and all(demand.size in (None, sizes[name]) for demand in demands)
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

    def counts(self, pp_ranks: Sequence[RankDevices]) -> list[int]:
        """Numbers of microbatches that divide the batch on all pipeline ranks."""
        requested = self.setup.request.microbatches
        if any(self.batch % pp_rank.data for pp_rank in pp_ranks):
            return []
        if self.setup.local:
            return [requested or 1]
        samples = math.gcd(*(self.batch // pp_rank.data for pp_rank in pp_ranks))
        fitting = [count for count in range(1, samples + 1) if samples % count == 0] if self.can_split_batch else [1]
        if requested is not None:
            return [count for count in fitting if count == requested]
        if len(pp_ranks) == 1:
            fitting = fitting[1:]  # without microbatches it is a flat plan, which another search covers
        if len(fitting) <= MOST_COUNTS:
            return fitting
        wanted = [len(pp_ranks) * 2.0**power for power in range(-1, MOST_COUNTS - 2)]
        near = {min(fitting, key=lambda count: abs(math.log(count / goal))) for goal in wanted}
        return sorted({*near, fitting[-1]})

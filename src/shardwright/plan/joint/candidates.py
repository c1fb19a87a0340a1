"""The pipelines that are looked at: seats, numbers of microbatches, schedules, each with a bound on its step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...schedule import schedule_kind
from .blocks import Blocks
from .bounds import SCHEDULES, bound_of
from .fronts import Alike, StageFronts
from .ranks import RankDevices, place_ranks, rank_assignments
from .setup import PipelineSetup

MOST_COUNTS = 8
"""Numbers of microbatches that are looked at on some seats."""


@dataclass(frozen=True, eq=False, slots=True)
class PipelineCandidate:
    """A pipeline without its cuts. Nothing of its kind takes less than `bound` seconds, which is rough until `sure`.

    alike     the numbers of the seats of each kind
    within    the bound knows of the memory
    """

    bound: float
    pp_ranks: tuple[RankDevices, ...]
    alike: Alike
    microbatches: int
    schedule: str
    within: bool = False
    sure: bool = False


def for_each(
    pp_ranks: Sequence[RankDevices], alike: Alike, measure: Callable[[RankDevices, int], float], microbatches: int
) -> list[float]:
    """A number for each seat, asked once for those of a kind."""
    found = [0.0] * len(pp_ranks)
    for numbers in alike:
        value = measure(pp_ranks[numbers[0]], microbatches)
        for number in numbers:
            found[number] = value
    return found


class PipelineCandidates:
    """All candidates of a setup. `cut` says whether the batch may be cut at all."""

    def __init__(self, setup: PipelineSetup, blocks: Blocks, fronts: StageFronts, *, cut: bool) -> None:
        self.setup, self.blocks, self.fronts, self.cut = setup, blocks, fronts, cut
        self.batch = setup.analysis.graph.batch or 1

    def __iter__(self) -> Iterator[PipelineCandidate]:
        asked = self.setup.asked
        for runs in rank_assignments(self.setup.cluster, self.setup.size):
            stages = sum(count for count, _, _ in runs)
            if stages > self.blocks.count or asked.stages not in (None, stages):
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
                bound = bound_of(alone, microbatches, schedule, after)
                yield PipelineCandidate(bound, pp_ranks, alike, microbatches, schedule)

    def by_now(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with what is known by now of larger microbatches."""
        return self._bounded(candidate, self.fronts.rough)

    def sure(self, candidate: PipelineCandidate) -> PipelineCandidate:
        """The same with a bound of its own size of microbatches."""
        return replace(self._bounded(candidate, self.fronts.quick), sure=True)

    def _bounded(self, candidate: PipelineCandidate, measure: Callable[[RankDevices, int], float]) -> PipelineCandidate:
        pp_ranks, alike, microbatches = candidate.pp_ranks, candidate.alike, candidate.microbatches
        alone = for_each(pp_ranks, alike, measure, microbatches)
        after = for_each(pp_ranks, alike, self.fronts.after, microbatches)
        bound = bound_of(alone, microbatches, candidate.schedule, after)
        return replace(candidate, bound=max(bound, candidate.bound))

    def _has_axes(self, pp_rank: RankDevices) -> bool:
        """Whether a seat has the axes that people name, in their sizes."""
        sizes = dict(zip(pp_rank.names, (pp_rank.data, pp_rank.inner), strict=True))
        return all(
            sizes.get(name, 1) > 1 and all(one.size in (None, sizes[name]) for one in asked)
            for name, asked in self.setup.limits.axes.items()
        )

    def _schedules(self, stages: int, microbatches: int) -> Iterator[str]:
        asked = self.setup.asked.schedule
        if stages == 1:
            yield asked or "1f1b"
            return
        for name in (asked,) if asked is not None else SCHEDULES:
            segments = schedule_kind(name).segments
            if stages * segments <= self.blocks.count and (segments == 1 or microbatches >= stages):
                yield name

    def counts(self, pp_ranks: Sequence[RankDevices]) -> list[int]:
        """Numbers of microbatches: the batch divides by them on all seats."""
        asked = self.setup.asked.microbatches
        if any(self.batch % pp_rank.data for pp_rank in pp_ranks):
            return []
        if self.setup.local:
            return [asked or 1]
        rows = math.gcd(*(self.batch // pp_rank.data for pp_rank in pp_ranks))
        fitting = [count for count in range(1, rows + 1) if rows % count == 0] if self.cut else [1]
        if asked is not None:
            return [count for count in fitting if count == asked]
        if len(pp_ranks) == 1:
            fitting = fitting[1:]  # a flat plan is looked at elsewhere
        if len(fitting) <= MOST_COUNTS:
            return fitting
        wanted = [len(pp_ranks) * 2.0**power for power in range(-1, MOST_COUNTS - 2)]
        near = {min(fitting, key=lambda count: abs(math.log(count / wish))) for wish in wanted}
        return sorted({*near, fitting[-1]})

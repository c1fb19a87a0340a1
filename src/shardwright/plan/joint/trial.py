"""A pipeline that is tried: pipeline ranks, microbatches, a schedule and cuts, and its step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ...schedule import ScheduleKind, SimulatedRun, StageEdge, StageTimes, simulate
from .front import StageSolution
from .ranks import RankDevices
from .stage import StageCost

Mix = tuple[tuple[StageSolution, float], ...]
"""Solutions, and the share of each."""

LONG = 6
"""Microbatches per segment that are simulated; each of the rest takes as long as the slowest rank needs for one."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """One pipeline.

    parts      the stage of each segment, in the order of the graph
    bounds     the blocks at which segments begin, and the end
    links      seconds that a microbatch's values take to enter each segment but the first
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
        """The pipeline rank of each segment."""
        return tuple(pp_rank for (pp_rank,) in self.schedule.holders(len(self.pp_ranks)))

    def stages_of(self, pp_rank: int) -> list[int]:
        """The segments of a pipeline rank."""
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
        stages = f"{len(self.pp_ranks)} stages {alike}" if len(self.pp_ranks) > 1 else "one stage"
        parts = f"{self.microbatches} microbatches" if self.microbatches > 1 else "no microbatches"
        return f"{stages}{f' ({inside})' if inside else ''}, {parts}, {self.schedule.name}"


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

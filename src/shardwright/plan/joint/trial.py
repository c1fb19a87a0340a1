"""A pipeline that is tried: pipeline ranks, microbatches, a schedule and cuts, and its step time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...schedule import ScheduleKind, SimulatedRun, StageEdge, StageTimes, in_flight, schedule_kind, simulate
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
    schedule: str
    parts: tuple[StageCost, ...]
    mixes: tuple[Mix, ...]
    bounds: tuple[int, ...]
    links: tuple[float, ...]
    seconds: float
    once: float  # of it, after the schedule
    bubble: float

    @property
    def kind(self) -> ScheduleKind:
        return schedule_kind(self.schedule)

    @property
    def holders(self) -> tuple[int, ...]:
        """The pipeline rank of each segment."""
        return tuple(pp_rank for (pp_rank,) in self.kind.holders(len(self.pp_ranks)))

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
        flight = flights(self.schedule, len(self.pp_ranks), self.microbatches)[pp_rank]
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
        return f"{stages}{f' ({inside})' if inside else ''}, {parts}, {self.schedule}"


@lru_cache(maxsize=4096)
def flights(schedule: str, pp_ranks: int, microbatches: int) -> tuple[float, ...]:
    """For each pipeline rank the most microbatches of segments in flight at once."""
    if pp_ranks == 1:
        return (1.0,)
    kind, some = schedule_kind(schedule), min(microbatches, 3 * pp_ranks)
    if kind.name == "1f1b":
        return tuple(float(min(some, pp_ranks - pp_rank)) for pp_rank in range(pp_ranks))
    if kind.name == "zb":
        return (float(min(some, pp_ranks)),) * pp_ranks
    if kind.name == "zbv":
        return tuple(float(min(2 * some, 2 * pp_ranks, some + 1 + pp_rank)) for pp_rank in range(pp_ranks))
    if kind.name.startswith("interleaved"):
        first = -(-some // max(1, some // pp_ranks))  # microbatches of the first round
        before = (kind.segments - 1) * first + 1
        return tuple(
            float(min(kind.segments * some, 2 * (pp_ranks - pp_rank - 1) + before)) for pp_rank in range(pp_ranks)
        )
    return in_flight(kind.make(pp_ranks, some))


def run_of(
    schedule: str, pp_ranks: int, microbatches: int, parts: Sequence[StageCost], links: Sequence[float]
) -> tuple[SimulatedRun, float]:
    """The simulated run of a schedule, and its seconds for all microbatches."""
    kind = schedule_kind(schedule)
    some = min(microbatches, max(LONG * pp_ranks * kind.segments, 32))
    apart = schedule.startswith("zb")
    times = [
        StageTimes(part.forward, part.backward - part.weight if apart else part.backward, part.weight if apart else 0.0)
        for part in parts
    ]
    edges = [StageEdge(at, at + 1, link, link) for at, link in enumerate(links)]
    run = simulate(kind.make(pp_ranks, some), times, edges)
    holders = kind.holders(pp_ranks)
    busy = [0.0] * pp_ranks
    for part, (pp_rank,) in zip(parts, holders, strict=True):
        busy[pp_rank] += part.forward + part.backward
    return run, run.total + (microbatches - some) * max(busy)

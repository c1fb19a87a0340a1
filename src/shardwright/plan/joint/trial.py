"""A pipeline that is tried: seats, microbatches, a schedule and cuts, and how long a step of it takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...schedule import ScheduleKind, SimulatedRun, StageEdge, StageTimes, in_flight, schedule_kind, simulate
from .front import StageSolution
from .ranks import RankDevices
from .stage import StageCost

Mix = tuple[tuple[StageSolution, float], ...]
"""Ways, and the part of each."""

LONG = 6
"""Microbatches a segment that are simulated; each of the rest takes as long as the slowest seat needs for one."""


@dataclass(frozen=True, kw_only=True)
class PipelineTrial:
    """One pipeline.

    parts      the stage of each segment, in the order of the line
    bounds     the blocks at which segments begin, and the end
    links      seconds that a microbatch's values take to enter each segment but the first
    """

    seats: tuple[RankDevices, ...]
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
        """The seat of each segment."""
        return tuple(seat for (seat,) in self.kind.holders(len(self.seats)))

    def of_seat(self, seat: int) -> list[int]:
        """The segments of a seat."""
        return [part for part, held in enumerate(self.holders) if held == seat]

    @property
    def busy(self) -> tuple[float, ...]:
        """Seconds that each seat computes for a microbatch."""
        return tuple(
            sum(self.parts[part].forward + self.parts[part].backward for part in self.of_seat(seat))
            for seat in range(len(self.seats))
        )

    @property
    def balance(self) -> float:
        """How much longer the slowest seat computes than the mean of all."""
        return max(self.busy) * len(self.busy) / sum(self.busy)

    def memory(self, seat: int) -> float:
        """Bytes of a device of a seat that are stored or kept."""
        flight = flights(self.schedule, len(self.seats), self.microbatches)[seat]
        own = [self.parts[part] for part in self.of_seat(seat)]
        return sum(part.stored + flight / len(own) * part.kept for part in own)

    def __str__(self) -> str:
        return self.said({})

    def said(self, names: Mapping[str, str]) -> str:
        """In words, with axes under these names."""
        first = self.seats[0]
        sizes = zip(first.names, (first.data, first.inner), strict=True)
        inside = " x ".join(f"{names.get(name, name)}={size}" for name, size in sizes if size > 1)
        counts = [len(seat.devices) for seat in self.seats]
        alike = f"of {counts[0]}" if len(set(counts)) == 1 else f"of {'+'.join(map(str, counts))}"
        stages = f"{len(self.seats)} stages {alike}" if len(self.seats) > 1 else "one stage"
        parts = f"{self.microbatches} microbatches" if self.microbatches > 1 else "no microbatches"
        return f"{stages}{f' ({inside})' if inside else ''}, {parts}, {self.schedule}"


@lru_cache(maxsize=4096)
def flights(schedule: str, seats: int, microbatches: int) -> tuple[float, ...]:
    """For each seat the most microbatches of segments that it keeps at once."""
    if seats == 1:
        return (1.0,)
    kind, some = schedule_kind(schedule), min(microbatches, 3 * seats)
    if kind.name == "1f1b":
        return tuple(float(min(some, seats - seat)) for seat in range(seats))
    if kind.name == "zb":
        return (float(min(some, seats)),) * seats
    if kind.name == "zbv":
        return tuple(float(min(2 * some, 2 * seats, some + 1 + seat)) for seat in range(seats))
    if kind.name.startswith("interleaved"):
        first = -(-some // max(1, some // seats))  # microbatches of the first round
        before = (kind.segments - 1) * first + 1
        return tuple(float(min(kind.segments * some, 2 * (seats - seat - 1) + before)) for seat in range(seats))
    return in_flight(kind.make(seats, some))


def run_of(
    schedule: str, seats: int, microbatches: int, parts: Sequence[StageCost], links: Sequence[float]
) -> tuple[SimulatedRun, float]:
    """The simulated run of a schedule, and its seconds for all microbatches."""
    kind = schedule_kind(schedule)
    some = min(microbatches, max(LONG * seats * kind.segments, 32))
    apart = schedule.startswith("zb")
    times = [
        StageTimes(part.forward, part.backward - part.weight if apart else part.backward, part.weight if apart else 0.0)
        for part in parts
    ]
    edges = [StageEdge(at, at + 1, link, link) for at, link in enumerate(links)]
    run = simulate(kind.make(seats, some), times, edges)
    holders = kind.holders(seats)
    busy = [0.0] * seats
    for part, (seat,) in zip(parts, holders, strict=True):
        busy[seat] += part.forward + part.backward
    return run, run.total + (microbatches - some) * max(busy)

"""How long a schedule takes: every step begins as soon as its devices are free and its messages are there.

Messages between the same two devices, in the same direction, go one after the other, in the order in which they are
sent, overlapped with computation. A stage on several devices runs on all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import ScheduleError
from .check import deadlock
from .dependencies import Dependencies, Edges, dependencies_of, merged
from .memory import MicrobatchMemory, in_flight
from .step import STEP_KINDS, Devices, Schedule


class StageTimes(NamedTuple):
    """Seconds of one microbatch of a stage.

    backward   the gradients of its inputs: B where W is a step of its own
    weight     the gradients of its parameters: W, or added to B where it is not. 0 if backward is already all of it
    prologue   P, once
    """

    forward: float
    backward: float
    weight: float = 0.0
    prologue: float = 0.0


UNIT = StageTimes(1.0, 1.0, 1.0, 1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """A schedule with its times.

    starts, ends   of each step, for each device, in seconds
    total          from the first start to the last end
    busy           seconds that each device computes
    peaks          the most that each device saves for backward: bytes, or without sizes microbatches of stages
    """

    schedule: Schedule
    starts: tuple[tuple[float, ...], ...]
    ends: tuple[tuple[float, ...], ...]
    total: float
    busy: tuple[float, ...]
    peaks: tuple[float, ...]

    @property
    def bubbles(self) -> tuple[float, ...]:
        """For each device the share of the time in which it waits."""
        return tuple(1 - busy / self.total if self.total else 0.0 for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The share of all devices' time that is waited away."""
        return sum(self.bubbles) / len(self.busy)


def simulate(
    schedule: Schedule, times: Sequence[StageTimes], edges: Edges = (), sizes: Sequence[MicrobatchMemory] | None = None
) -> SimulatedRun:
    """Run a schedule that has passed `check` with these times, one for each stage."""
    if len(times) != schedule.stages:
        raise ScheduleError(f"{schedule} has {schedule.stages} stages, but there are times of {len(times)}")
    wiring = dependencies_of(schedule, edges)
    spans = _spans(schedule, wiring, times)
    ends = _end_times(wiring, spans)
    starts: dict[int, tuple[float, ...]] = {}
    stops: dict[int, tuple[float, ...]] = {}
    busy = [0.0] * len(schedule.devices)
    for devices, row in zip(wiring.groups, wiring.rows, strict=True):
        began, ended = tuple([ends[number] - spans[number] for number in row]), tuple([ends[number] for number in row])
        working = sum([spans[number] for number in row])
        for device in devices:
            starts[device], stops[device], busy[device] = began, ended, working
    return SimulatedRun(
        schedule=schedule,
        starts=tuple(starts[device] for device in range(len(busy))),
        ends=tuple(stops[device] for device in range(len(busy))),
        total=max((row[-1] for row in stops.values() if row), default=0.0),
        busy=tuple(busy),
        peaks=in_flight(schedule, sizes),
    )


def _spans(schedule: Schedule, wiring: Dependencies, times: Sequence[StageTimes]) -> list[float]:
    """The seconds of each step, by its number."""
    spans: list[float] = []
    each = {
        "P": [time.prologue for time in times],
        "F": [time.forward for time in times],
        "B": [time.backward + time.weight for time in times],
        "W": [time.weight for time in times],
    }
    for kind in STEP_KINDS:
        for seconds in each[kind]:
            spans += [seconds] * schedule.microbatches
    block = schedule.stages * schedule.microbatches
    first = STEP_KINDS.index("W") * block
    for row in wiring.rows:
        for number in row:
            if number >= first:  # a W, whose B is the rest only
                spans[number - block] = times[(number - first) // schedule.microbatches].backward
    return spans


def _end_times(wiring: Dependencies, spans: list[float]) -> list[float]:
    """When each step ends. A step starts when all that it waits for is done, and frees its device and its links."""
    microbatches, after, sends = wiring.microbatches, wiring.after, wiring.sends
    waits = list(wiring.waits)
    ready = [0.0] * len(waits)
    free = [0.0] * wiring.links
    todo = [number for number in {row[0] for row in wiring.rows if row} if not waits[number]]
    done = 0
    while todo:
        number = todo.pop()
        done += 1
        end = ready[number] = ready[number] + spans[number]
        for other in after[number]:
            if ready[other] < end:
                ready[other] = end
            waits[other] -= 1
            if not waits[other]:
                todo.append(other)
        for offset, links, seconds in sends[number // microbatches]:
            arrival = end
            for link in links:
                begin = free[link] if free[link] > end else end
                free[link] = begin + seconds
                if free[link] > arrival:
                    arrival = free[link]
            other = number + offset
            if ready[other] < arrival:
                ready[other] = arrival
            waits[other] -= 1
            if not waits[other]:
                todo.append(other)
    if done < len({number for row in wiring.rows for number in row}):
        raise ScheduleError(f"the schedule can't be simulated: {deadlock(wiring)}")
    return ready


def lower_bound(
    holders: Sequence[Devices],
    microbatches: int,
    times: Sequence[StageTimes],
    edges: Edges = (),
    *,
    splits_weights: bool = False,
) -> float:
    """Seconds that every training schedule needs, found without making one; times as for `simulate`.

    A device begins when the first microbatch has come to it, does all its work, and after its last B the gradients
    still have to go back to the start (with W apart it may end with a W). Exact for gpipe and 1f1b with equal stages
    and messages that take no time.
    """
    joined = merged(edges).values()
    head = [0.0] * len(times)  # until the stage's first F begins
    tail = [0.0] * len(times)  # from the end of the stage's last B
    for edge in sorted(joined):
        sent = edge.forward if holders[edge.source] != holders[edge.target] else 0.0
        head[edge.target] = max(head[edge.target], head[edge.source] + times[edge.source].forward + sent)
        if edge.backward is not None and not splits_weights:
            sent = edge.backward if holders[edge.source] != holders[edge.target] else 0.0
            back = times[edge.source].backward + times[edge.source].weight
            tail[edge.target] = max(tail[edge.target], tail[edge.source] + back + sent)
    most = 0.0
    for stages in _by_device(holders):
        work = sum(times[at].prologue + microbatches * sum(times[at][:3]) for at in stages)
        most = max(most, min(head[at] for at in stages) + work + min(tail[at] for at in stages))
    return most


def _by_device(holders: Sequence[Devices]) -> Iterable[list[int]]:
    stages: dict[int, list[int]] = {}
    for stage, devices in enumerate(holders):
        for device in devices:
            stages.setdefault(device, []).append(stage)
    return stages.values()

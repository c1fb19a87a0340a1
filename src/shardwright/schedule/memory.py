"""What a device keeps for backwards that are to come. It depends on the order of steps only, not on their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .step import Schedule, Step


class MicrobatchMemory(NamedTuple):
    """Bytes that one microbatch of a segment keeps on each of its devices.

    forward    from the end of its F to the end of its B
    backward   from the end of its B to the end of its W, where W is a step of its own
    """

    forward: float
    backward: float


ONE_MICROBATCH = MicrobatchMemory(1, 1)  # counts microbatches, each until its last step


def in_flight(schedule: Schedule, sizes: Sequence[MicrobatchMemory] | None = None) -> tuple[float, ...]:
    """For each device the most that it keeps at once: in bytes, or without sizes in microbatches of segments."""
    peaks = [0.0] * len(schedule.devices)
    for group in schedule.groups():
        most, _ = fullest(schedule.devices[group[0]], sizes or [ONE_MICROBATCH] * schedule.segments)
        for device in group:
            peaks[device] = most
    return tuple(peaks)


def fullest(steps: Sequence[Step], sizes: Sequence[MicrobatchMemory]) -> tuple[float, Step | None]:
    """The most that these steps keep at once, and the step that brings it there."""
    apart = {step[1:] for step in steps if step[0] == "W"}
    backward = any(step[0] == "B" for step in steps)
    saved = most = 0.0
    at = None
    for step in steps:
        kind, segment, _ = step
        if kind == "F" and backward:
            saved += sizes[segment][0]
        elif kind == "B":
            saved -= sizes[segment][0]
            if apart and step[1:] in apart:
                saved += sizes[segment][1]
        elif kind == "W":
            saved -= sizes[segment][1]
        if saved > most:
            most, at = saved, step
    return most, at

"""What a device saves for backward. It depends on the order of steps only, not on their times."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from .step import Schedule, Step


class MicrobatchMemory(NamedTuple):
    """Bytes that one microbatch of a stage saves on each of its devices.

    forward    from the end of its F to the end of its B
    backward   from the end of its B to the end of its W, where W is a step of its own
    """

    forward: float
    backward: float


ONE_MICROBATCH = MicrobatchMemory(1, 1)  # counts microbatches, each until its last step


def in_flight(schedule: Schedule, sizes: Sequence[MicrobatchMemory] | None = None) -> tuple[float, ...]:
    """For each device the most that it saves at once: in bytes, or without sizes in microbatches of stages."""
    peaks = [0.0] * len(schedule.devices)
    for group in schedule.groups():
        most, _ = fullest(schedule.devices[group[0]], sizes or [ONE_MICROBATCH] * schedule.stages)
        for device in group:
            peaks[device] = most
    return tuple(peaks)


def fullest(steps: Sequence[Step], sizes: Sequence[MicrobatchMemory]) -> tuple[float, Step | None]:
    """The most that these steps save at once, and the step that reaches it."""
    most, at = 0.0, None
    for step, saved in zip(steps, saved_after(steps, sizes), strict=True):
        if saved > most:
            most, at = saved, step
    return most, at


def saved_after(steps: Sequence[Step], sizes: Sequence[MicrobatchMemory]) -> list[float]:
    """What is saved after each of these steps."""
    apart = {step[1:] for step in steps if step[0] == "W"}
    backward = any(step[0] == "B" for step in steps)
    saved, amounts = 0.0, []
    for step in steps:
        kind, stage, _ = step
        if kind == "F" and backward:
            saved += sizes[stage][0]
        elif kind == "B":
            saved -= sizes[stage][0]
            if apart and step[1:] in apart:
                saved += sizes[stage][1]
        elif kind == "W":
            saved -= sizes[stage][1]
        amounts.append(saved)
    return amounts

"""A schedule as data: for each device the steps it runs, in order.

    P0.0          stage 0, prologue: once, before all its forwards
    F0.3          stage 0, microbatch 3, forward
    B0.3          its backward: all of it, or where there is a W0.3, only the gradients of its inputs
    W0.3          its backward: the gradients of its parameters

A stage may lie on several devices. They run its steps together, since there are collectives inside.
What a schedule means is here; whether one can run is checked in `check.py`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast, get_args

from ..errors import ScheduleError, raise_all
from ..layout import MOST_DEVICES

StepKind = Literal["P", "F", "B", "W"]
STEP_KINDS: tuple[StepKind, ...] = get_args(StepKind)
STEP = re.compile(r"([PFBW])(\d{1,9})\.(\d{1,9})")

Devices = tuple[int, ...]


class Step(NamedTuple):
    """One step of a device. A tuple, because a planner makes and hashes them by the million."""

    kind: StepKind
    segment: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.kind}{self.segment}.{self.microbatch}"

    @staticmethod
    def parse(text: str) -> Step:
        """The step that is written so: "F0.3"."""
        if not (match := STEP.fullmatch(text)):
            raise ScheduleError(
                f"{text[:80]!r} is no step; write kind, stage and microbatch as in F0.3, kind one of PFBW"
            )
        return Step(cast(StepKind, match[1]), int(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """What each device runs, in order.

    devices        for each device its steps
    holders        for each stage the devices that run it, as indices into `devices`
    microbatches   how many parts the batch has
    name           for people: "1f1b"
    """

    devices: tuple[tuple[Step, ...], ...]
    holders: tuple[Devices, ...]
    microbatches: int
    name: str

    def __post_init__(self) -> None:
        raise_all(ScheduleError, f"the schedule {self.name!r} is malformed:", list(self._faults()))

    def _faults(self) -> Iterable[str]:
        if not self.devices or not self.holders:
            yield f"it has {len(self.devices)} devices and {len(self.holders)} stages; both must be at least 1"
        if self.microbatches < 1:
            yield f"it has {self.microbatches} microbatches; it must have at least 1"
        for segment, devices in enumerate(self.holders):
            if not devices:
                yield f"stage {segment} lies on no device"
            if list(devices) != sorted(set(devices)):
                yield f"stage {segment} lies on the devices {devices}; name each once, in rising order"
            if unknown := [device for device in devices if not 0 <= device < len(self.devices)]:
                yield f"stage {segment} lies on the devices {unknown}; there are only 0 to {len(self.devices) - 1}"
        for steps in {id(steps): steps for steps in self.devices}.values():
            for step in steps:
                if step.kind not in STEP_KINDS:
                    yield f"{step} has the kind {step.kind!r}; the kinds are {', '.join(STEP_KINDS)}"

    def __str__(self) -> str:
        return f"{self.name} ({self.segments} stages, {len(self.devices)} devices, {self.microbatches} microbatches)"

    @property
    def segments(self) -> int:
        return len(self.holders)

    @property
    def splits_weights(self) -> bool:
        """Whether gradients of parameters are steps of their own, somewhere."""
        return self._has("W")

    @property
    def inference(self) -> bool:
        """Whether nothing goes backward."""
        return not self._has("B")

    def _has(self, kind: StepKind) -> bool:
        return any(step[0] == kind for group in self.groups() for step in self.devices[group[0]])

    def held_by(self, device: int) -> tuple[int, ...]:
        """The stages of a device."""
        return tuple(segment for segment, devices in enumerate(self.holders) if device in devices)

    def groups(self) -> tuple[Devices, ...]:
        """Devices that hold and run the same, in the order of their first: they do all at the same time."""
        segments: list[list[int]] = [[] for _ in self.devices]
        for segment, devices in enumerate(self.holders):
            for device in devices:
                segments[device].append(segment)
        same: dict[int, int] = {}  # rows that are one object are not compared
        first: dict[tuple[Step, ...], int] = {}
        groups: dict[tuple[int, ...], list[int]] = {}
        for device, steps in enumerate(self.devices):
            if id(steps) not in same:
                same[id(steps)] = first.setdefault(steps, device)
            groups.setdefault((same[id(steps)], *segments[device]), []).append(device)
        return tuple(tuple(devices) for devices in groups.values())

    def to_json(self) -> dict[str, Any]:
        """Lists of strings. Devices that run the same are on one line: "0-3: F0.0 F0.1 B0.0 B0.1"."""
        return {
            "name": self.name,
            "microbatches": self.microbatches,
            "holders": [show_devices(devices) for devices in self.holders],
            "steps": [
                f"{show_devices(devices)}: {' '.join(map(str, self.devices[devices[0]]))}".rstrip()
                for devices in self.groups()
            ],
        }

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Schedule:
        if missing := [key for key in ("name", "microbatches", "holders", "steps") if key not in data]:
            raise ScheduleError(f"a schedule is missing {', '.join(missing)}; it has only {', '.join(data)}")
        rows: dict[int, tuple[Step, ...]] = {}
        for line in data["steps"]:
            where, _, listed = line.partition(":")
            steps = tuple(Step.parse(word) for word in listed.split())
            for device in read_devices(where):
                if device in rows:
                    raise ScheduleError(f"the schedule {data['name']!r} has two lists of steps for device {device}")
                rows[device] = steps
        if absent := [device for device in range(max(rows, default=0)) if device not in rows]:
            raise ScheduleError(f"the schedule {data['name']!r} has no list of steps for the devices {absent}")
        return Schedule(
            devices=tuple(rows[device] for device in range(len(rows))),
            holders=tuple(read_devices(devices) for devices in data["holders"]),
            microbatches=data["microbatches"],
            name=data["name"],
        )


def show_devices(devices: Iterable[int]) -> str:
    """Devices in short: "0-3,8"."""
    runs: list[list[int]] = []
    for device in sorted(devices):
        if runs and runs[-1][1] == device - 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def read_devices(text: str) -> Devices:
    """Devices from "0-3,8"."""
    devices: list[int] = []
    for word in text.split(","):
        if not (run := re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", word)):
            raise ScheduleError(f"{text[:80]!r} names no devices; write them as in 0-3,8")
        if int(run[2] or run[1]) >= MOST_DEVICES:
            raise ScheduleError(f"device {run[2] or run[1]} is too many; there may be {MOST_DEVICES}")
        devices += range(int(run[1]), int(run[2] or run[1]) + 1)
    return tuple(devices)

"""A run as a picture for the terminal: a line for each device, time to the right.

     0   forward of microbatch 0      [0]   its backward       (0)   the part of its backward that is for parameters
    <P>  prologue                     ...   nothing to do      ~     time that is left out

Where a device has several stages, a letter tells them apart: 0a is microbatch 0 in the first of them.
Devices that do the same share a line.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import floor
from string import ascii_lowercase

from .dependencies import Edges
from .simulate import UNIT, SimulatedRun, StageTimes, simulate
from .step import Schedule, Step, show_devices

FRAMES = {"P": ("<", ">"), "F": (" ", " "), "B": ("[", "]"), "W": ("(", ")")}
NARROW = {"P": "p", "F": "f", "B": "b", "W": "w"}  # where a step is too short for its label
MARK = " ~ "
LONGEST = 4  # cells that a step of usual length takes at most, so that one very short step does not stretch the rest
MOST_LETTERS = 1_000_000  # of a line before it is shortened: steps may differ in length without limit


def draw(
    schedule: Schedule, times: Sequence[StageTimes] | None = None, edges: Edges | None = None, width: int = 120
) -> str:
    """The picture of a schedule with these times, or with 1 for each step. Without edges stages form a chain."""
    if edges is None:
        edges = [(stage, stage + 1) for stage in range(schedule.stages - 1)]
    return draw_run(simulate(schedule, times or [UNIT] * schedule.stages, edges), width)


def draw_run(run: SimulatedRun, width: int = 120) -> str:
    """The picture of a run, at most so many letters wide."""
    schedule = run.schedule
    groups = schedule.groups()
    names = [show_devices(group) for group in groups]
    labels = [_labels(schedule, group[0]) for group in groups]
    cell = 2 + max((len(label) for row in labels for label in row), default=1)
    per_second = _scale(run, cell)
    margin = max(map(len, names))
    body = [
        _line(run, group[0], row, per_second).ljust(_column(run.total * per_second), ".")
        for group, row in zip(groups, labels, strict=True)
    ]
    lines = [
        f"{name:>{margin}} |{_shortened(line, width - margin - 3, cell)}|"
        for name, line in zip(names, body, strict=True)
    ]
    return "\n".join([f"{schedule}, bubble {100 * run.bubble:.1f} %", *lines]) + "\n"


def _scale(run: SimulatedRun, cell: int) -> float:
    """Letters for a second, so that the label of the shortest step fits."""
    spans = sorted(
        round(end - start, 12)
        for starts, ends in zip(run.starts, run.ends, strict=True)
        for start, end in zip(starts, ends, strict=True)
        if end > start
    )
    if not spans:
        return 0.0
    return min(cell / max(spans[0], spans[len(spans) // 2] / LONGEST), MOST_LETTERS / run.total)


def _labels(schedule: Schedule, device: int) -> list[str]:
    stages = schedule.held_by(device)

    def label(step: Step) -> str:
        number = "P" if step.kind == "P" else str(step.microbatch)
        if len(stages) == 1:
            return number
        if len(stages) > len(ascii_lowercase):
            return f"{step.stage}.{number}"
        return number + ascii_lowercase[stages.index(step.stage)]

    return [label(step) for step in schedule.devices[device]]


def _line(run: SimulatedRun, device: int, labels: list[str], per_second: float) -> str:
    line = ""
    steps = zip(run.schedule.devices[device], labels, run.starts[device], run.ends[device], strict=True)
    for step, label, start, end in steps:
        line = line.ljust(_column(start * per_second), ".")
        line += _cell(step, label, _column(end * per_second) - len(line))
    return line


def _column(place: float) -> int:
    """Always up at a half, so that steps of equal length look it."""
    return floor(place + 0.5 + 1e-9)


def _cell(step: Step, label: str, width: int) -> str:
    if width < len(label) + 2:
        return NARROW[step.kind] * width
    left, right = FRAMES[step.kind]
    return f"{left}{label.rjust((width - 2 + len(label)) // 2).ljust(width - 2)}{right}"


def _shortened(line: str, width: int, cell: int) -> str:
    """The beginning and the end of a line that is too long, with the middle left out between cells of usual length."""
    if len(line) <= width:
        return line
    shown = (width - len(MARK)) // (2 * cell) * cell
    return f"{line[:shown]}{MARK}{line[len(line) - shown :]}"

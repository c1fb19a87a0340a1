"""Which collectives this rank has entered, so that ranks that wait for each other can say for what.

A collective has a number: how many this rank has entered in the same process group. All members
of a group enter the same ones in the same order, so that the first number that some have and
others have not is the one that hangs, and the first that differs is where they desynchronized.

`enter` is called before every collective of a step. It costs about two microseconds, and nothing
where nobody watches. No tensor is kept alive: only shapes, code and places in it.
"""

from __future__ import annotations

import linecache
import os
import re
import sys
from collections import deque
from dataclasses import asdict, dataclass
from types import CodeType, FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

CAPACITY = 128  # collectives that are recorded

Place = tuple[CodeType, int]
"""Code, and where in it: what a frame is at, without keeping the frame."""

_RUNTIME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_OURS = (_RUNTIME, os.path.dirname(torch.__file__), os.path.dirname(os.__file__))
_SOURCE = re.compile(r"(\S+\.py:\d+)\s*$")


class RecordedCollective(NamedTuple):
    """One recorded collective."""

    group: Any  # a process group, or (source, target) of a message
    number: int
    kind: str
    what: Any  # a shape, or something that says what it is when it is printed
    place: Place | None
    backward: bool


class FlightRecorder:
    """The last collectives of this rank."""

    def __init__(self) -> None:
        self.entered: deque[RecordedCollective] = deque(maxlen=CAPACITY)
        self.counts: dict[Any, int] = {}
        self.total = 0
        self.within: Place | None = None  # the line of forward whose backward runs
        self.doing: Any = None  # the step of a schedule that runs
        self.expected: dict[tuple[int, int], int] = {}  # messages that were asked for
        self.awaits: tuple[tuple[int, int], int] | None = None  # the message that is waited for

    def enter(self, kind: str, group: Any, what: Any) -> None:
        if group is None:
            group = dist.group.WORLD
        self.total += 1
        number = self.counts[group] = self.counts.get(group, 0) + 1
        within = self.within
        place = place_of(sys._getframe(2)) if within is None else within
        self.entered.append(RecordedCollective(group, number, kind, what, place, within is not None))


_recorder: FlightRecorder | None = None


def begin() -> FlightRecorder:
    """Start to record."""
    global _recorder
    _recorder = FlightRecorder()
    return _recorder


def end() -> None:
    """Stop recording."""
    global _recorder
    _recorder = None


def enter(kind: str, group: Any, what: Any = None) -> None:
    """Note a collective that is about to be issued."""
    if _recorder is not None:
        _recorder.enter(kind, group, what)


def send(source: int, target: int) -> None:
    """Note a message that is about to be sent."""
    if _recorder is not None:
        _recorder.enter("message", (source, target), _recorder.doing)


def expect(source: int, target: int) -> int:
    """Note a message that was asked for; which of that rank it is."""
    if _recorder is None:
        return 0
    number = _recorder.expected[source, target] = _recorder.expected.get((source, target), 0) + 1
    return number


def wait_for(source: int, target: int, number: int) -> None:
    """Note the message that this rank waits for."""
    if _recorder is not None:
        _recorder.awaits = (source, target), number


def record_step(step: Any) -> None:
    """Note the step of a schedule that begins; None after the last."""
    if _recorder is not None:
        _recorder.doing, _recorder.awaits = step, None


def here() -> Place | None:
    """Where the program is, for the backward of what it does there."""
    return place_of(sys._getframe(1)) if _recorder is not None else None


def within(place: Place | None) -> Place | None:
    """The backward of a line begins, or ends with what this returned."""
    if _recorder is None:
        return None
    before, _recorder.within = _recorder.within, place
    return before


def place_of(frame: FrameType | None) -> Place | None:
    """Where the first frame is that is neither ours nor torch's: a line of generated code, or of the user's."""
    while frame is not None:
        file = frame.f_code.co_filename
        ours = _known.get(file)
        if ours is None:
            ours = _known[file] = file.startswith((*_OURS, "<frozen", "<string"))
        if not ours:
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


_known: dict[str, bool] = {}


# -- in words, for others ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLine:
    """A place in words: file and line, the text there, and the line of the user's model that it comes from."""

    at: str
    text: str
    source: str | None

    def __str__(self) -> str:
        comes = f", which comes from {self.source}" if self.source else ""
        return f"{self.at} ({self.text}){comes}"


def line_of(place: Place) -> RecordedLine:
    code, last = place
    numbers = [line for start, stop, line in code.co_lines() if start <= last < stop and line is not None]
    number = numbers[0] if numbers else code.co_firstlineno
    return _line_at(code.co_filename, number)


def _line_at(file: str, number: int) -> RecordedLine:
    text = linecache.getline(file, number).strip().split("  # ")[0]
    return RecordedLine(at=f"{file}:{number}", text=text, source=_source(file, number))


def caller() -> FrameType | None:
    """The frame that calls the one that asks."""
    return sys._getframe(2)


def line_in(entry: str) -> RecordedLine | None:
    """The line of generated code that an entry of a printed stack names, if it does."""
    match = re.match(r'\s*File "(.*)", line (\d+)', entry)
    if match is None or not _is_generated(match[1]):
        return None
    return _line_at(match[1], int(match[2]))


def _is_generated(file: str) -> bool:
    return any("Generated from plan" in linecache.getline(file, line) for line in (1, 2))


def _source(file: str, number: int) -> str | None:
    """The user's line that a line of generated code stands for: its own comment, or the nearest above."""
    if not _is_generated(file):
        return None
    for above in range(number, max(0, number - 30), -1):
        text = linecache.getline(file, above)
        comment = _SOURCE.search(text) if "  # " in text else None
        if comment or text.lstrip().startswith("def "):
            return comment[1] if comment else None
    return None


def report_of(recorder: FlightRecorder, frame: FrameType | None, waiting: bool) -> dict[str, Any]:
    """The state of a rank for a hang report, as JSON."""
    place = place_of(frame)
    return {
        "waiting": waiting,
        "doing": None if recorder.doing is None else str(recorder.doing),
        "awaits": recorder.awaits,
        "at": asdict(line_of(place)) if place is not None else None,
        "counts": [[name_of(group), number] for group, number in list(recorder.counts.items())],
        "entered": [_entered(record) for record in list(recorder.entered)],
    }


def _entered(record: RecordedCollective) -> dict[str, Any]:
    return {
        "group": name_of(record.group), "number": record.number, "kind": record.kind,
        "what": _what(record.what), "backward": record.backward,
        "at": asdict(line_of(record.place)) if record.place is not None else None,
    }  # fmt: skip


def _what(what: Any) -> str:
    return "" if what is None else f"a tensor {list(what)}" if isinstance(what, tuple) else str(what)


def name_of(group: Any) -> list[Any]:
    """The name of a group, which all its members know, and its ranks."""
    if isinstance(group, tuple):
        return ["message", list(group)]
    return [str(group.group_name), [int(rank) for rank in dist.get_process_group_ranks(group)]]

"""The collectives that this rank has entered, so that a hang report can say what ranks wait for.

A collective has a number: how many this rank has entered in the same process group. All members
of a group enter the same ones in the same order, so the first number that some have and others have
not is the one that hangs, and the first that differs is where they desynchronized.

`enter` is called before every collective of a step. It costs about two microseconds, and nothing
if recording is off. No tensor is kept alive: only shapes and code locations.
"""

from __future__ import annotations

import functools
import hashlib
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
"""A code object and a position in it: the location of a frame, without keeping the frame alive."""

_PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_LOOPS = tuple(os.path.join(_PACKAGE, part) for part in ("train", "lightning", "cli"))
"""Training loops of ours, whose lines are named as a user's are."""
_OURS = (_PACKAGE, os.path.dirname(torch.__file__), os.path.dirname(os.__file__), "<frozen", "<string")
_SOURCE = re.compile(r"(\S+\.py:\d+)\s*$")


class RecordedCollective(NamedTuple):
    """One recorded collective."""

    group: Any  # a process group, or (source, target) of a message
    number: int
    kind: str
    what: Any  # a shape, or an object that describes itself when printed
    place: Place | None
    backward: bool


class FlightRecorder:
    """The last collectives of this rank."""

    def __init__(self) -> None:
        self.entered: deque[RecordedCollective] = deque(maxlen=CAPACITY)
        self.counts: dict[Any, int] = {}
        self.total = 0
        self.identity = 0  # of the collective that was entered and is not posted yet
        self.within: Place | None = None  # the line of forward whose backward is running
        self.doing: Any = None  # the running step of a schedule
        self.expected: dict[tuple[int, int], int] = {}  # receives that were posted
        self.awaits: tuple[tuple[int, int], int] | None = None  # the message being waited for

    def enter(self, kind: str, group: Any, what: Any, *, beside: bool = False) -> None:
        if group is None:
            group = dist.group.WORLD
        self.total += 1
        number = self.counts[group] = self.counts.get(group, 0) + 1
        within = self.within
        place = place_of(sys._getframe(2)) if within is None else within
        self.entered.append(RecordedCollective(group, number, kind, what, place, within is not None))
        if beside:
            return
        described = what if isinstance(what, (str, tuple)) else type(what).__name__
        self.identity = _identity(kind, described, within is not None)


@functools.lru_cache(4096)
def _identity(kind: str, what: Any, backward: bool) -> int:
    """A number by which ranks notice that they have entered different collectives: 16 bits, never 0."""
    text = f"{kind} {without_sizes(_what(what))} {backward}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=2).digest(), "big") or 1


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
    """Record a collective that is about to be issued."""
    if _recorder is not None:
        _recorder.enter(kind, group, what)


def enter_beside(kind: str, group: Any, what: Any) -> None:
    """Record a collective that is issued by another thread, beside those of the steps."""
    if _recorder is not None:
        _recorder.enter(kind, group, what, beside=True)


def take_identity() -> int:
    """The identity of the collective that was just entered; 0 if none was recorded since the last."""
    if _recorder is None:
        return 0
    identity, _recorder.identity = _recorder.identity, 0
    return identity


def send(source: int, target: int) -> None:
    """Record a message that is about to be sent."""
    if _recorder is not None:
        _recorder.enter("message", (source, target), _recorder.doing)


def expect(source: int, target: int) -> int:
    """Record a posted receive; returns the number of its message from that rank."""
    if _recorder is None:
        return 0
    number = _recorder.expected[source, target] = _recorder.expected.get((source, target), 0) + 1
    return number


def wait_for(source: int, target: int, number: int) -> None:
    """Record the message that this rank waits for."""
    if _recorder is not None:
        _recorder.awaits = (source, target), number


def record_step(step: Any) -> None:
    """Record the step of a schedule that begins; None after the last."""
    if _recorder is not None:
        _recorder.doing, _recorder.awaits = step, None


def here() -> Place | None:
    """The current location in the program, for the backward of its ops."""
    return place_of(sys._getframe(1)) if _recorder is not None else None


def within(place: Place | None) -> Place | None:
    """The backward of a line begins; pass the returned value to end it."""
    if _recorder is None:
        return None
    before, _recorder.within = _recorder.within, place
    return before


def place_of(frame: FrameType | None) -> Place | None:
    """The location of the innermost frame outside of shardwright and torch: generated code, or the user's."""
    while frame is not None:
        file = frame.f_code.co_filename
        ours = _known.get(file)
        if ours is None:
            ours = _known[file] = file.startswith(_OURS) and not file.startswith(_LOOPS)
        if not ours:
            return frame.f_code, frame.f_lasti
        frame = frame.f_back
    return None


_known: dict[str, bool] = {}


# -- as text, for other ranks --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedLine:
    """A location as text: file and line, the code there, and the line of the user's model it comes from."""

    at: str
    text: str
    source: str | None

    def __str__(self) -> str:
        comes = f", from {self.source}" if self.source else ""
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
    """The frame of the caller."""
    return sys._getframe(2)


def called_at() -> str:
    """The user's line that has led here, in brackets; empty if it is not known."""
    place = place_of(sys._getframe(1))
    return f" ({line_of(place)})" if place is not None else ""


def line_in(entry: str) -> RecordedLine | None:
    """The line of generated code named by an entry of a printed stack, if any."""
    match = re.match(r'\s*File "(.*)", line (\d+)', entry)
    if match is None or not _is_generated(match[1]):
        return None
    return _line_at(match[1], int(match[2]))


def _is_generated(file: str) -> bool:
    return any("Generated from plan" in linecache.getline(file, line) for line in (1, 2))


def _source(file: str, number: int) -> str | None:
    """The user's line of a line of generated code: from its comment, or the nearest above."""
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


def without_sizes(what: str) -> str:
    """What a collective sends, without the sizes of its tensor, which differ between ranks where shards are uneven."""
    return re.sub(r"\d+", "n", what) if what.startswith("a tensor [") else what


def name_of(group: Any) -> list[Any]:
    """The name of a group, common to its members, and its ranks."""
    if isinstance(group, tuple):
        return ["message", list(group)]
    return [str(group.group_name), [int(rank) for rank in dist.get_process_group_ranks(group)]]

"""Ranks that wait for each other for ever: asking all of them where they are, and saying what is wrong.

The thread of a rank that has waited for too long asks, through the store; the threads of all ranks answer, also
of those that are busy elsewhere, and it compares what they say (`explain`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from . import flight_recorder

Said = Mapping[str, Any]


class Inquiry:
    """Questions and answers through a store."""

    def __init__(self, store: Any, rank: int, size: int, notes: flight_recorder.FlightRecorder) -> None:
        self._store, self._rank, self._size, self._notes = store, rank, size, notes
        self._number = 0
        self._mark: Any = None  # how far this rank was when it was last looked at
        self._since, self._told = 0.0, False

    def answer(self, frame: FrameType | None, waiting: bool) -> None:
        """Say where this rank is, if somebody has asked."""
        if self._store.check([f"ask/{self._number}"]):
            text = json.dumps(flight_recorder.report_of(self._notes, frame, waiting))
            self._store.set(f"where/{self._number}/{self._rank}", text)
            self._number += 1

    def ask(self, frame: FrameType | None, waited: float, patience: float) -> str | None:
        """Why ranks wait for each other, as far as they say within some seconds. None if another rank asks already."""
        number = self._number
        asks = self._store.compare_set(f"ask/{number}", "", str(self._rank))
        self.answer(frame, waiting=True)
        if int(asks) != self._rank:  # somebody else does
            return None
        keys = {rank: f"where/{number}/{rank}" for rank in range(self._size)}
        until = time.monotonic() + patience
        while time.monotonic() < until and not self._store.check(list(keys.values())):
            time.sleep(0.1)
        said = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return explain(said, self._size, waited)

    def idle(self, mark: Any, frame: FrameType | None, after: float, patience: float) -> str | None:
        """Which collective ranks lack, if this one has been at `mark` for long. None if none does, or it is known.

        For devices that collectives run on by themselves: the thread waits elsewhere, or not at all.
        """
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since, self._told = mark, now, False
        if self._told or now - self._since < after:
            return None
        self._told = True
        found = self.ask(frame, now - self._since, patience)
        return found if found is not None and NOTHING not in found else None


NOTHING = "in nothing that a compiled model does"


def explain(said: Mapping[int, Said], size: int, waited: float) -> str:
    """What ranks that wait for each other wait for, and where each is."""
    found = _parted(said) or _missing(said) or _message(said)
    head = f"the ranks have waited for each other for {waited:.0f} s"
    lines = [f"{head}: {found}" if found else f"{head}, {NOTHING}"]
    places: dict[str, list[int]] = {}
    for rank in range(size):
        places.setdefault(_where(said.get(rank)), []).append(rank)
    lines += [f"  {_ranks(ranks)} {text}" for text, ranks in places.items()]
    return "\n".join(lines)


def _where(one: Said | None) -> str:
    if one is None:
        return "gave no answer: it is busy in code that lets no other thread run, or its machine is gone"
    step = f"in step {one['doing']}, " if one["doing"] else ""
    return f"{step}{'waits' if one['waiting'] else 'is busy'} at {_line(one['at'])}"


def _parted(said: Mapping[int, Said]) -> str | None:
    """The first collective of a group that its members did not enter alike."""
    by_group: dict[str, dict[int, dict[int, Any]]] = {}
    for rank, one in said.items():
        for held in one["entered"]:
            by_group.setdefault(json.dumps(held["group"]), {}).setdefault(held["number"], {})[rank] = held
    for numbers in by_group.values():
        for _, held in sorted(numbers.items()):
            kinds: dict[tuple[Any, ...], list[int]] = {}
            for rank, one in held.items():
                at = one["at"]["at"].rsplit("/", 1)[-1] if one["at"] else None
                kinds.setdefault((one["kind"], one["backward"], at), []).append(rank)
            if len(kinds) > 1 and next(iter(held.values()))["kind"] != "message":
                each = [f"{_ranks(ranks)} entered {_collective(held[ranks[0]])}" for ranks in kinds.values()]
                return f"they don't do the same: {', but '.join(each)}"
    return None


def _missing(said: Mapping[int, Said]) -> str | None:
    """The first collective that some members of a group have entered and others have not."""
    groups: dict[str, dict[int, int]] = {}
    for rank, one in said.items():
        for group, number in one["counts"]:
            groups.setdefault(json.dumps(group), {})[rank] = number
    found: list[tuple[bool, int, str]] = []
    for text, counts in groups.items():
        name, ranks = json.loads(text)
        counted = {rank: counts.get(rank, 0) for rank in ranks if rank in said}
        lost = [rank for rank in ranks if rank not in said]
        least = min(counted.values())
        late = [rank for rank, number in counted.items() if number == least]
        if name == "message" or (least == max(counted.values()) and not lost):
            continue
        if least == max(counted.values()):  # only those that gave no answer can be late
            late, least = [], least - 1
        held = _entered(said, [name, ranks], least + 1)
        if held is not None:
            here = [rank for rank in counted if rank not in late]
            missing = sorted([*late, *lost])
            busy = any(rank in lost or not said[rank]["waiting"] for rank in missing)
            text = f"{_collective(held)} over {_ranks(ranks)}: entered by {_ranks(here)}, not by {_ranks(missing)}"
            found.append((not busy, least, text))
    return min(found)[2] if found else None


def _message(said: Mapping[int, Said]) -> str | None:
    """A message of a pipeline that is waited for and was not sent."""
    found: list[tuple[bool, int, str]] = []
    for rank, one in said.items():
        if one["awaits"] is None or not one["waiting"]:
            continue
        (source, _), number = one["awaits"]
        giver = said.get(source)
        sent = {json.dumps(group): count for group, count in giver["counts"]} if giver is not None else {}
        count = sent.get(json.dumps(["message", [source, rank]]), 0)
        if giver is None or count < number:
            waits = f"rank {rank} in step {one['doing']} waits for message {number} of rank {source}"
            text = f"{waits}, which has sent {count}"
            found.append((giver is not None and giver["waiting"], number, text))
    return min(found)[2] if found else None


def _entered(said: Mapping[int, Said], group: Any, number: int) -> Any:
    for one in said.values():
        for held in one["entered"]:
            if held["group"] == group and held["number"] == number:
                return held
    return None


def _collective(held: Any) -> str:
    way = " in backward of" if held["backward"] else " at"
    what = f" of {held['what']}" if held["what"] else ""
    return f"{held['kind']}{what} (no. {held['number']} of its group){way} {_line(held['at'])}"


def _line(held: Any) -> str:
    return str(flight_recorder.RecordedLine(**held)) if held is not None else "an unknown place"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

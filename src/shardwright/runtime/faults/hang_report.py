"""Hang reports for ranks that wait for each other: where each of them is, and which collective is incomplete.

The watch thread of a rank that has waited for too long asks through the store; the watch threads of all ranks answer,
also of those that are busy elsewhere, and it compares their reports (`explain`).
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping
from types import FrameType
from typing import Any

from . import flight_recorder

RankReport = Mapping[str, Any]


class Inquiry:
    """Collects the reports of all ranks through a store."""

    def __init__(self, store: Any, rank: int, size: int, notes: flight_recorder.FlightRecorder) -> None:
        self._store, self._rank, self._size, self._notes = store, rank, size, notes
        self._number = 0
        self._turn = threading.Lock()  # of the main thread and the watch thread
        self._mark: Any = None  # the progress of this rank at the last check
        self._since, self._reported = 0.0, False
        self._doubted: Any = None  # where this rank last asked whether all are in the same collective

    def answer(self, frame: FrameType | None, waiting: bool) -> None:
        """Report where this rank is, if another rank has asked."""
        with self._turn:
            if self._store.check([f"ask/{self._number}"]):
                text = json.dumps(flight_recorder.report_of(self._notes, frame, waiting))
                self._store.set(f"where/{self._number}/{self._rank}", text)
                self._number += 1

    def ask(self, frame: FrameType | None, waited: float, patience: float) -> str | None:
        """Why ranks wait, from the reports that arrive within some seconds. None if another rank asks already."""
        number = self._number
        asks = self._store.compare_set(f"ask/{number}", "", str(self._rank))
        self.answer(frame, waiting=True)
        if int(asks) != self._rank:  # another rank asks
            return None
        keys = {rank: f"where/{number}/{rank}" for rank in range(self._size)}
        until = time.monotonic() + patience
        while time.monotonic() < until and not self._store.check(list(keys.values())):
            time.sleep(0.1)
        reports = {rank: json.loads(self._store.get(key)) for rank, key in keys.items() if self._store.check([key])}
        return explain(reports, self._size, waited)

    def explain_desync(self, frame: FrameType | None, patience: float) -> str | None:
        """What ranks have entered as the same collective, and tell all ranks; None if that can't be found out.

        Ends the run of all ranks, whatever call they are in, since what they exchange can't be trusted any more.
        """
        report = self.ask(frame, 0.0, patience)
        if report is not None:
            self._store.set(DESYNC, report)
        until = time.monotonic() + 2 * patience
        while report is None and time.monotonic() < until:  # another rank asks
            report = self.known_desync()
            time.sleep(0.1)
        return report

    def known_desync(self) -> str | None:
        """What has been found out about desynchronized ranks, by any of them."""
        return self._store.get(DESYNC).decode() if self._store.check([DESYNC]) else None

    def doubt(self, mark: Any, frame: FrameType | None, waited: float, patience: float) -> str | None:
        """A rank that waits at `mark` asks, once, whether all are in the same collective; reports to all if not."""
        if mark == self._doubted:
            return None
        self._doubted = mark
        report = self.ask(frame, waited, patience)
        if report is None or OUT_OF_STEP not in report:
            return None
        self._store.set(DESYNC, report)
        return report

    def idle(self, mark: Any, frame: FrameType | None, after: float, patience: float) -> str | None:
        """The collective that some ranks lack, if this one has been at `mark` for long. None if none, or known.

        For devices on which collectives run asynchronously: the thread waits elsewhere, or not at all.
        """
        now = time.monotonic()
        if mark != self._mark:
            self._mark, self._since, self._reported = mark, now, False
        if self._reported or now - self._since < after:
            return None
        self._reported = True
        report = self.ask(frame, now - self._since, patience)
        return report if report is not None and NOTHING not in report else None


NOTHING = "outside of the compiled model"
DESYNC = "desync"  # the key of what ends the run, whatever call a rank is in
OUT_OF_STEP = "they are desynchronized: "
REMEDY = (
    "do on all ranks, and in the same order, what communicates (the model's calls, backward, the optimizer, clipping, "
    "saving, whole state dicts); print and log on one"
)


def explain(reports: Mapping[int, RankReport], size: int, waited: float) -> str:
    """What the ranks wait for, and where each of them is."""
    cause = _desynchronized(reports) or _missing(reports) or _message(reports)
    head = f"the ranks have waited for each other for {waited:.0f} s" if waited else "the ranks wait for each other"
    lines = [f"{head}: {cause}" if cause else f"{head}, {NOTHING}"]
    places: dict[str, list[int]] = {}
    for rank in range(size):
        places.setdefault(_where(reports.get(rank)), []).append(rank)
    lines += [f"  {_ranks(ranks)} {text}" for text, ranks in places.items()]
    return "\n".join(lines)


def _where(report: RankReport | None) -> str:
    if report is None:
        return "gave no answer: it is in code that holds the GIL, or its machine is down"
    step = f"in step {report['doing']}, " if report["doing"] else ""
    return f"{step}{'waits' if report['waiting'] else 'is busy'} at {_line(report['at'])}"


def _desynchronized(reports: Mapping[int, RankReport]) -> str | None:
    """The first collective of a group in which its members differ."""
    by_group: dict[str, dict[int, dict[int, Any]]] = {}
    for rank, report in reports.items():
        for record in report["entered"]:
            by_group.setdefault(json.dumps(record["group"]), {}).setdefault(record["number"], {})[rank] = record
    for numbers in by_group.values():
        for _, records in sorted(numbers.items()):
            kinds: dict[tuple[Any, ...], list[int]] = {}
            for rank, record in records.items():
                # Generated code is the same on all ranks; of their own scripts, ranks may be at different lines.
                at = record["at"]["at"].rsplit("/", 1)[-1] if record["at"] and record["at"]["source"] else None
                what = flight_recorder.without_sizes(record["what"])
                kinds.setdefault((record["kind"], what, record["backward"], at), []).append(rank)
            if len(kinds) > 1 and next(iter(records.values()))["kind"] != "message":
                each = [f"{_ranks(ranks)} entered {_collective(records[ranks[0]])}" for ranks in kinds.values()]
                return f"{OUT_OF_STEP}{', but '.join(each)}; {REMEDY}"
    return None


def _missing(reports: Mapping[int, RankReport]) -> str | None:
    """The first collective that some members of a group have entered and others have not."""
    groups: dict[str, dict[int, int]] = {}
    for rank, report in reports.items():
        for group, number in report["counts"]:
            groups.setdefault(json.dumps(group), {})[rank] = number
    candidates: list[tuple[bool, int, str]] = []
    for text, counts in groups.items():
        name, ranks = json.loads(text)
        counted = {rank: counts.get(rank, 0) for rank in ranks if rank in reports}
        lost = [rank for rank in ranks if rank not in reports]
        least = min(counted.values())
        late = [rank for rank, number in counted.items() if number == least]
        if name == "message" or (least == max(counted.values()) and not lost):
            continue
        if least == max(counted.values()):  # only ranks that gave no answer can be late
            late, least = [], least - 1
        record = _entered(reports, [name, ranks], least + 1)
        if record is not None:
            here = [rank for rank in counted if rank not in late]
            missing = sorted([*late, *lost])
            busy = any(rank in lost or not reports[rank]["waiting"] for rank in missing)
            text = f"{_collective(record)} over {_ranks(ranks)}: entered by {_ranks(here)}, not by {_ranks(missing)}"
            candidates.append((not busy, least, text))
    return min(candidates)[2] if candidates else None


def _message(reports: Mapping[int, RankReport]) -> str | None:
    """A pipeline message that is waited for and was not sent."""
    candidates: list[tuple[bool, int, str]] = []
    for rank, report in reports.items():
        if report["awaits"] is None or not report["waiting"]:
            continue
        (source, _), number = report["awaits"]
        sender = reports.get(source)
        sent = {json.dumps(group): count for group, count in sender["counts"]} if sender is not None else {}
        count = sent.get(json.dumps(["message", [source, rank]]), 0)
        if sender is None or count < number:
            waits = f"rank {rank} in step {report['doing']} waits for message {number} of rank {source}"
            text = f"{waits}, which has sent {count}"
            candidates.append((sender is not None and sender["waiting"], number, text))
    return min(candidates)[2] if candidates else None


def _entered(reports: Mapping[int, RankReport], group: Any, number: int) -> Any:
    for report in reports.values():
        for record in report["entered"]:
            if record["group"] == group and record["number"] == number:
                return record
    return None


def _collective(record: Any) -> str:
    where = " in backward of" if record["backward"] else " at"
    what = f" of {record['what']}" if record["what"] else ""
    return f"{record['kind']}{what} (no. {record['number']} of its group){where} {_line(record['at'])}"


def _line(line: Any) -> str:
    return str(flight_recorder.RecordedLine(**line)) if line is not None else "an unknown location"


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"

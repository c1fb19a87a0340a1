"""What runs in forward, in backward and after them, op by op, as it was priced: the details of a timeline.

The blocks of a phase add up to its predicted time. Kernels and blocking communication stand in the order of the
program. Overlapped collectives have a lane of their own, where they stand as late as what reads them allows (all_gather
of ZeRO-3) or as early as their gradient is there; what kernels don't hide of them is one block at the end of the phase.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ...cost.resources import Resource
from ...ir import Graph
from ...plan.joint.stage_costs import seconds_of
from ...plan.priced_parts import PricedTables, SentMessage, StepPart
from .interning import Interned, short

COMPUTE, BLOCKING, OVERLAPPED, EXPOSED, UPDATE = range(5)  # kinds of blocks
PHASES = ("forward", "backward")


class TimelineBlock(NamedTuple):
    """A stretch of a lane."""

    name: str
    kind: int
    start: float
    seconds: float
    op: str  # that it belongs to, by name


@dataclass(frozen=True, kw_only=True)
class TimelinePhase:
    """Blocks of one phase of one microbatch, and how long it takes in all."""

    seconds: float
    blocks: tuple[TimelineBlock, ...] = field(repr=False)

    def as_json(self, names: Interned) -> dict[str, Any]:
        """Columns, in microseconds; ops by their number in `names`."""
        return {
            "seconds": short(self.seconds),
            "names": [names.number(block.name) for block in self.blocks],
            "kinds": [block.kind for block in self.blocks],
            "starts": [round(1e6 * block.start, 2) for block in self.blocks],
            "lengths": [round(1e6 * block.seconds, 2) for block in self.blocks],
            "ops": [names.number(block.op) for block in self.blocks],
        }


def phases_of(priced: PricedTables, graph: Graph, overlap: float) -> dict[str, TimelinePhase]:
    """Forward and backward of one microbatch, and the update after all of them."""
    parts = list(priced.parts())
    used = sum((part.used for part in parts), np.zeros(len(Resource)))
    first_reader = _readers(graph)
    order = {op.name: at for at, op in enumerate(graph.ops)}
    times = dict(zip(PHASES, map(float, seconds_of(used, overlap)), strict=True))
    phases = {
        when: _phase(sorted(parts, key=lambda part: _place(part, order)), when, times[when], priced.times, first_reader)
        for when in PHASES
    }
    return {**phases, "update": _update(parts, float(used[Resource.UPDATE]))}


def _readers(graph: Graph) -> dict[str, tuple[str, str]]:
    """For each parameter the first and the last op that reads it."""
    readers: dict[str, tuple[str, str]] = {}
    for parameter in graph.parameters:
        users = [op.name for op, _ in graph.users.get(parameter.value, ())]
        if users:
            readers[parameter.key] = users[0], users[-1]
    return readers


def _place(part: StepPart, order: Mapping[str, int]) -> tuple[int, int]:
    """Where a part stands in forward: a reshard is before its reader, or behind what makes the value."""
    if part.kind == "reshard":
        return (order[part.reader], 0) if part.reader else (order.get(part.name, -1), 2)
    return order.get(part.name, -1), 1


def _phase(
    parts: Sequence[StepPart], when: str, total: float, times: int, readers: Mapping[str, tuple[str, str]]
) -> TimelinePhase:
    compute, send = Resource[f"COMPUTE_{when.upper()}"], Resource[f"SEND_{when.upper()}"]
    blocks: list[TimelineBlock] = []
    now = 0.0
    for part in parts if when == "forward" else reversed(parts):
        op = part.reader or part.name
        for kind, seconds in ((COMPUTE, float(part.used[compute])), (BLOCKING, float(part.used[send]))):
            if seconds > 0:
                blocks.append(TimelineBlock(_name(part, kind, when), kind, now, seconds, op))
                now += seconds
    beside = list(_overlapped(parts, when, times, blocks, readers))
    if total - now > 1e-9 * total:
        blocks.append(TimelineBlock("exposed overlapped communication", EXPOSED, now, total - now, ""))
    return TimelinePhase(seconds=total, blocks=(*blocks, *_on_a_lane(beside, when, total)))


def _name(part: StepPart, kind: int, when: str) -> str:
    if kind == BLOCKING:
        sent = [message for message in part.messages if message.when == when and not message.overlapped]
        collectives = dict.fromkeys(f"{message.collective} over {', '.join(message.axes)}" for message in sent)
        return "; ".join(collectives) or "communication"
    return part.name if part.kind != "reshard" else f"reshard for {part.reader or 'its readers'}"


class OverlappedBlock(NamedTuple):
    """A collective that runs while kernels do. `bound`: until when a gather is done, or from when a sum can begin."""

    message: SentMessage
    seconds: float
    bound: float
    op: str


def _overlapped(
    parts: Sequence[StepPart],
    when: str,
    times: int,
    blocks: Sequence[TimelineBlock],
    readers: Mapping[str, tuple[str, str]],
) -> Iterator[OverlappedBlock]:
    starts: dict[str, float] = {}
    ends: dict[str, float] = {}
    for block in blocks:
        starts.setdefault(block.op, block.start)
        ends[block.op] = block.start + block.seconds
    for part in parts:
        for message in part.messages:
            if message.overlapped and message.when == when and message.seconds > 0:
                first, last = readers.get(part.name, (part.name, part.name))
                if when == "backward":
                    first, last = last, first
                gathers = message.collective == "all_gather"
                bound = starts.get(first, 0.0) if gathers else ends.get(last, 0.0)
                yield OverlappedBlock(message, message.seconds / times, bound, part.name)


def _on_a_lane(waiting: Sequence[OverlappedBlock], when: str, total: float) -> Iterator[TimelineBlock]:
    """Overlapped collectives one after the other, none behind the end of the phase."""
    ordered = sorted(waiting, key=lambda item: item.bound)
    left = sum(item.seconds for item in ordered)
    now = 0.0
    for at, item in enumerate(ordered):
        gathers = item.message.collective == "all_gather"
        later = ordered[at + 1].bound - ordered[at + 1].seconds if gathers and at + 1 < len(ordered) else item.bound
        wanted = min(item.bound, later) - item.seconds if gathers else item.bound
        start = min(max(now, wanted), max(now, total - left))
        name = f"{item.message.collective} over {', '.join(item.message.axes)}"
        yield TimelineBlock(name, OVERLAPPED, start, item.seconds, item.op)
        now, left = start + item.seconds, left - item.seconds


def _update(parts: Sequence[StepPart], total: float) -> TimelinePhase:
    """The optimizer, then what gathers or sums what it has changed."""
    sums: dict[str, float] = {}
    for part in parts:
        for message in part.messages:
            if message.when == "update" and message.seconds > 0:
                name = f"{message.collective} over {', '.join(message.axes)}"
                sums[name] = sums.get(name, 0.0) + message.seconds
    now = max(0.0, total - sum(sums.values()))
    blocks = [TimelineBlock("optimizer.step", UPDATE, 0.0, now, "")] if now > 1e-9 * total else []
    for name, seconds in sums.items():
        blocks.append(TimelineBlock(name, BLOCKING, now, seconds, ""))
        now += seconds
    return TimelinePhase(seconds=total, blocks=tuple(blocks))

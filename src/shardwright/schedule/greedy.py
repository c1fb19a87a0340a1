"""A schedule made for given times: whenever a device is free, it takes the most urgent step that can run.

For what the known kinds have no answer to: stages on any devices, values that skip stages, very unequal times.
With equal stages in a chain it is as good as 1F1B, and a little worse than the zero-bubble kinds: simulate both.
Microbatches of a stage are taken in order, so there are few steps to choose from.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import heappop, heappush
from itertools import pairwise

from ..errors import ScheduleError
from .dependencies import Edges, merged
from .memory import ONE_MICROBATCH, MicrobatchMemory
from .simulate import StageTimes
from .step import STEP_KINDS, Devices, Schedule, Step, StepKind, show_devices

Lane = tuple[StepKind, int]  # all microbatches of one kind and stage
Event = tuple[float, StepKind, int, int, bool]  # when, what, and whether it ends there or a message for it arrives


def greedy(
    holders: Sequence[Devices],
    microbatches: int,
    times: Sequence[StageTimes],
    edges: Edges,
    *,
    limit: float | None = None,
    sizes: Sequence[MicrobatchMemory] | None = None,
    kinds: str = "FBW",
    name: str = "greedy",
) -> Schedule:
    """Backwards first, forwards as long as saved activations fit the limit, W when there is nothing else.

    limit   bytes that a device may save for backward, or without sizes microbatches of stages
    kinds   "FBW", "FB" with unsplit backwards, or "F" for inference
    """
    if len(times) != len(holders):
        raise ScheduleError(f"there are {len(holders)} stages, but times of {len(times)}")
    maker = _Maker(tuple(holders), microbatches, tuple(times), edges, limit, sizes, kinds)
    return Schedule(devices=maker.run(), holders=tuple(holders), microbatches=microbatches, name=name)


class _Maker:
    def __init__(
        self,
        holders: tuple[Devices, ...],
        microbatches: int,
        times: tuple[StageTimes, ...],
        edges: Edges,
        limit: float | None,
        sizes: Sequence[MicrobatchMemory] | None,
        kinds: str,
    ) -> None:
        self.holders, self.microbatches, self.kinds = holders, microbatches, kinds
        self.limit = float("inf") if limit is None or kinds == "F" else limit
        self.sizes = sizes or [ONE_MICROBATCH] * len(holders)
        self.rows: list[list[Step]] = [[] for _ in range(1 + max(device for devices in holders for device in devices))]
        self.saved = [0.0] * len(self.rows)
        self.busy = [False] * len(self.rows)
        self.spans: dict[Lane, float] = {}
        for at, time in enumerate(times):
            full_backward = time.backward + (0.0 if "W" in kinds else time.weight)
            self.spans |= {("F", at): time.forward, ("B", at): full_backward, ("W", at): time.weight}
        lanes: list[Lane] = [(kind, at) for kind in STEP_KINDS[1:] if kind in kinds for at in range(len(holders))]
        lanes.sort(key=lambda lane: ("BFW".index(lane[0]), -lane[1]))
        self.lanes = [[lane for lane in lanes if device in holders[lane[1]]] for device in range(len(self.rows))]
        self.next = dict.fromkeys(lanes, 0)
        self.readers: dict[Lane, list[tuple[Lane, float]]] = {lane: [] for lane in lanes}
        for source, target, forward, backward in merged(edges).values():
            local = holders[source] == holders[target]
            self.readers["F", source].append((("F", target), 0.0 if local else forward))
            if "B" in kinds and backward is not None:
                self.readers["B", target].append((("B", source), 0.0 if local else backward))
        for at in range(len(holders)):
            for first, then in pairwise(STEP_KINDS[1:]):
                if then in kinds:
                    self.readers[first, at].append(((then, at), 0.0))
        waits = {lane: sum(lane == reader for of in self.readers.values() for reader, _ in of) for lane in lanes}
        self.waits = {lane: [count] * microbatches for lane, count in waits.items()}

    def run(self) -> tuple[tuple[Step, ...], ...]:
        """Go from event to event: a step ends, or a message arrives."""
        events: list[Event] = []
        for device in range(len(self.rows)):
            self.begin(0.0, device, events)
        while events:
            now, touched = events[0][0], set[int]()
            while events and events[0][0] == now:  # all that happens at once, before anybody chooses
                _, kind, stage, at, ends = heappop(events)
                touched.update(self.holders[stage])
                if ends:
                    self.end(now, (kind, stage), at, events)
                else:
                    self.waits[kind, stage][at] -= 1
            for device in sorted(touched):
                self.begin(now, device, events)
        if left := [lane for lane, done in self.next.items() if done < self.microbatches]:
            full = show_devices({device for _, at in left for device in self.holders[at]})
            raise ScheduleError(
                f"the limit of {self.limit:,.0f} is too low: the devices {full} may save no more, and can't continue"
            )
        return tuple(map(tuple, self.rows))

    def begin(self, now: float, device: int, events: list[Event]) -> None:
        if self.busy[device]:
            return
        for lane in self.lanes[device]:
            at, holders = self.next[lane], self.holders[lane[1]]
            if at == self.microbatches or self.waits[lane][at] or any(self.busy[other] for other in holders):
                continue
            more = self.growth(lane)
            if more > 0 and any(self.saved[other] + more > self.limit for other in holders):
                continue
            self.next[lane] += 1
            for other in holders:
                self.busy[other] = True
                self.saved[other] += more
                self.rows[other].append(Step(*lane, at))
            heappush(events, (now + self.spans[lane], *lane, at, True))
            return

    def end(self, now: float, lane: Lane, at: int, events: list[Event]) -> None:
        for device in self.holders[lane[1]]:
            self.busy[device] = False
        for reader, seconds in self.readers[lane]:
            heappush(events, (now + seconds, *reader, at, False))

    def growth(self, lane: Lane) -> float:
        """How much more a device saves for backward after this step."""
        forward, backward = self.sizes[lane[1]]
        rest = backward if "W" in self.kinds else 0.0
        return {"F": forward, "B": rest - forward, "W": -rest}.get(lane[0], 0.0)

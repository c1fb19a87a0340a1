"""A second opinion: devices that run their steps one by one, with messages and with a clock, written without wiring.

Every step leaves a mark of what it made, and each reader asks for all the marks that it needs.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from shardwright.schedule import Schedule, StageEdge, StageTimes, Step


class Fault(Exception):
    """A step that makes no sense where it stands."""


class Machine:
    """Takes turns: each device runs what it can, then the next one. `run` returns "done" or "stuck"."""

    def __init__(self, schedule: Schedule, edges: Iterable[StageEdge | tuple[int, int]]) -> None:
        self.schedule = schedule
        self.edges = [StageEdge(*edge) for edge in edges]
        self.rows = [deque(row) for row in schedule.devices]
        self.queues: dict[tuple[int, int], deque[Step]] = defaultdict(deque)
        self.known: list[set[Step]] = [set() for _ in self.rows]  # own results and those that came in
        self.ran: list[set[Step]] = [set() for _ in self.rows]

    def run(self) -> str:
        moved = True
        while moved:
            moved = False
            for device, row in enumerate(self.rows):
                while row and self.may_run(device, row[0]):
                    self.execute(row[0])
                    moved = True
        if any(self.rows):
            return "stuck"
        self.complete()
        return "done"

    def needs(self, step: Step) -> list[Step]:
        kind, stage, at = step
        if kind == "F":
            return [Step("F", edge.source, at) for edge in self.edges if edge.target == stage]
        if kind == "B":
            return [
                Step("B", edge.target, at) for edge in self.edges if edge.source == stage and edge.backward is not None
            ]
        return []

    def may_run(self, device: int, step: Step) -> bool:
        if not 0 <= step.stage < self.schedule.stages or device not in self.schedule.holders[step.stage]:
            raise Fault(f"{step} does not belong to device {device}")
        together = self.schedule.holders[step.stage]
        return all(self.rows[other] and self.rows[other][0] == step for other in together) and all(
            self.received(other, step) for other in together
        )

    def received(self, device: int, step: Step) -> bool:
        for (_, receiver), queue in self.queues.items():
            if receiver == device:
                self.known[device].update(queue)
                queue.clear()
        return self.known[device].issuperset(self.needs(step))

    def execute(self, step: Step) -> None:
        kind, stage, at = step
        for device in self.schedule.holders[stage]:
            ran = self.ran[device]
            if step in ran or not 0 <= at < (1 if kind == "P" else self.schedule.microbatches):
                raise Fault(f"{step} again, or too far")
            before = {"P": None, "F": None, "B": Step("F", stage, at), "W": Step("B", stage, at)}[kind]
            if before and before not in ran:
                raise Fault(f"{step} has nothing to work on")
            if kind == "P" and any(other[:2] == ("F", stage) for other in ran):
                raise Fault(f"{step} comes after a forward")
            ran.add(step)
            self.known[device].add(step)
            self.rows[device].popleft()
        for sender in self.schedule.holders[stage]:
            for receiver in self.readers(step):
                if receiver != sender:
                    self.queues[sender, receiver].append(step)

    def readers(self, step: Step) -> set[int]:
        ends = [edge.target for edge in self.edges if step.kind == "F" and edge.source == step.stage]
        ends += [edge.source for edge in self.edges if step.kind == "B" and edge.target == step.stage]
        return {device for stage in ends for device in self.schedule.holders[stage]}

    def complete(self) -> None:
        kinds = "F" if self.schedule.inference else "FB"
        for stage, holder in enumerate(self.schedule.holders):
            for at in range(self.schedule.microbatches):
                for device in holder:
                    if not self.ran[device].issuperset(Step(kind, stage, at) for kind in kinds):
                        raise Fault(f"device {device} left out a part of {stage}.{at}")


def runs(schedule: Schedule, edges: Iterable[StageEdge | tuple[int, int]]) -> str:
    """done, stuck, or a fault."""
    try:
        return Machine(schedule, edges).run()
    except Fault as fault:
        return f"fault: {fault}"


def timed(schedule: Schedule, times: Sequence[StageTimes], edges: Sequence[StageEdge]) -> dict[Step, float]:
    """When each step ends, found with a clock that goes from event to event. One edge at most between two stages."""
    machine = Machine(schedule, edges)
    split = {step[1:] for row in schedule.devices for step in row if step.kind == "W"}
    free: dict[tuple[int, int], float] = defaultdict(float)
    missing = {
        (device, step): sum(
            len([other for other in schedule.holders[need.stage] if other != device]) or 1
            for need in machine.needs(step)
        )
        for row in schedule.devices
        for step in row
        for device in schedule.holders[step.stage]
    }
    ends: dict[Step, float] = {}
    busy: set[int] = set()
    events: list[tuple[float, int, tuple[str, Step, int]]] = []
    number = 0

    def later(when: float, what: tuple[str, Step, int]) -> None:
        nonlocal number
        number += 1
        heapq.heappush(events, (when, number, what))

    def begin(now: float) -> None:
        for row in machine.rows:
            while row:
                step = row[0]
                stored = schedule.holders[step.stage]
                there = all(machine.rows[d] and machine.rows[d][0] == step and d not in busy for d in stored)
                if not there or any(missing[device, step] for device in stored):
                    break
                time = times[step.stage]
                whole = time.backward + (0 if step[1:] in split else time.weight)
                span = {"P": time.prologue, "F": time.forward, "B": whole, "W": time.weight}[step.kind]
                for device in stored:
                    machine.rows[device].popleft()
                    busy.add(device)
                later(now + span, ("end", step, -1))
                break

    def send(now: float, step: Step, to: Step, seconds: float) -> None:
        holders = schedule.holders
        for receiver in holders[to.stage]:
            senders = [device for device in holders[step.stage] if device != receiver]
            for sender in senders or [receiver]:
                arrival = now
                if holders[step.stage] != holders[to.stage] and sender != receiver:
                    arrival = free[sender, receiver] = max(now, free[sender, receiver]) + seconds
                later(arrival, ("message", to, receiver))

    begin(0.0)
    while events:
        now, _, (what, step, device) = heapq.heappop(events)
        if what == "message":
            missing[device, step] -= 1
        else:
            ends[step] = now
            busy.difference_update(schedule.holders[step.stage])
            for edge in machine.edges:
                if step.kind == "F" and edge.source == step.stage:
                    send(now, step, Step("F", edge.target, step.microbatch), edge.forward)
                if step.kind == "B" and edge.target == step.stage and edge.backward is not None:
                    send(now, step, Step("B", edge.source, step.microbatch), edge.backward)
        begin(now)
    return ends

"""A schedule with some of its steps in another order, as near to the one it was as can be.

All steps of all devices are put in one order that keeps every dependency and every wanted pair, and each device runs
its own in that order: so nothing can deadlock. Steps keep their places where they can.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush

from ..errors import ScheduleError
from .dependencies import Edges, merged
from .simulate import UNIT, simulate
from .step import STEP_KINDS, Schedule, Step

StepPair = tuple[Step, Step]
"""Two steps: the first has to run before the second."""


def reordered(schedule: Schedule, pairs: Sequence[StepPair], edges: Edges, name: str) -> Schedule:
    """A schedule that has passed `check`, with the first step of each pair before the second."""
    every = dict.fromkeys(step for row in schedule.devices for step in row)
    for pair in pairs:
        _check_pair(schedule, every, *pair)
    before: dict[Step, set[Step]] = {step: set() for step in every}
    for first, second in (*_dependencies(every, edges), *pairs):
        before[second].add(first)
    place = _places(schedule, edges)
    order = _sorted(before, place)
    if len(order) < len(every):
        stuck = " ".join(str(step) for step in sorted(every.keys() - set(order), key=lambda step: place[step])[:8])
        raise ScheduleError(
            f"the wanted order of steps contradicts itself, or what steps need of each other: {stuck} wait in a circle"
        )
    at = {step: number for number, step in enumerate(order)}
    rows = tuple(tuple(sorted(row, key=lambda step: at[step])) for row in schedule.devices)
    return replace(schedule, devices=rows, name=name)


def _check_pair(schedule: Schedule, every: Container[Step], first: Step, second: Step) -> None:
    if first == second:
        raise ScheduleError(f"{first} can't run before itself; name two steps")
    for step in (first, second):
        if step not in every:
            raise ScheduleError(f"there is no step {step} in {schedule}")
    if not set(schedule.holders[first.stage]) & set(schedule.holders[second.stage]):
        raise ScheduleError(
            f"{first} and {second} run on different devices, which wait for each other's values and for nothing else; "
            "order steps of one device"
        )


def _dependencies(every: Iterable[Step], edges: Edges) -> list[StepPair]:
    """What each step needs, of its own stage and of others."""
    pairs: list[StepPair] = []
    known, edges_between = set(every), merged(edges).values()
    for step in known:
        kinds = STEP_KINDS[: STEP_KINDS.index(step.kind)]
        needs = [Step(kind, step.stage, 0 if kind == "P" else step.microbatch) for kind in kinds]
        for edge in edges_between:
            if step.kind == "F" and edge.target == step.stage:
                needs.append(Step("F", edge.source, step.microbatch))
            if step.kind == "B" and edge.source == step.stage and edge.backward is not None:
                needs.append(Step("B", edge.target, step.microbatch))
        pairs += [(needed, step) for needed in needs if needed in known]
    return pairs


def _places(schedule: Schedule, edges: Edges) -> dict[Step, tuple[float, int, int]]:
    """When each step begins if all take equally long."""
    run = simulate(schedule, [UNIT] * schedule.stages, edges)
    return {
        step: (run.starts[device][at], device, at)
        for device, row in reversed(list(enumerate(schedule.devices)))
        for at, step in enumerate(row)
    }


def _sorted(before: dict[Step, set[Step]], place: dict[Step, tuple[float, int, int]]) -> list[Step]:
    """Steps in an order that keeps what is before what, the earliest first; those in a circle are left out."""
    waits = {step: len(needed) for step, needed in before.items()}
    after: dict[Step, list[Step]] = {step: [] for step in before}
    for step, needed in before.items():
        for other in needed:
            after[other].append(step)
    ready = [(place[step], step) for step, count in waits.items() if not count]
    heapify(ready)
    order: list[Step] = []
    while ready:
        _, step = heappop(ready)
        order.append(step)
        for other in after[step]:
            waits[other] -= 1
            if not waits[other]:
                heappush(ready, (place[other], other))
    return order

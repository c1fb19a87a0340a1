"""Whether a schedule can run: every step there once and in its place, no deadlock, memory within the limit.

A schedule that passes runs to its end whatever times its steps take, as long as messages are sent without waiting for
the receiver, and awaited when the step that reads them begins.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations, pairwise

from ..errors import ScheduleError, raise_all
from .dependencies import Dependencies, Edges, StageEdge, dependencies_of, merged
from .memory import MicrobatchMemory, fullest
from .step import STEP_KINDS, Devices, Schedule, Step, StepKind, show_devices

MOST_FAULTS = 12


def check(
    schedule: Schedule,
    edges: Edges,
    *,
    limit: float | Sequence[float] | None = None,
    sizes: Sequence[MicrobatchMemory] | None = None,
) -> Schedule:
    """Return the schedule, or raise one error with everything that is wrong with it.

    edges   the values that cross between stages: pairs (from, to), or Edge
    limit   bytes that a device may save for backward, one number or one per device; needs sizes
    sizes   for each stage what a microbatch saves
    """
    joined = merged(edges)
    _refuse(schedule, list(_odd_edges(schedule, joined)))
    rows = [_Row(group, schedule) for group in schedule.groups()]
    faults = [
        *_misplaced(schedule, rows),
        *_missing(schedule, rows),
        *_out_of_order(schedule, rows, joined),
        *_disagreeing(rows),
        *_too_full(schedule, rows, limit, sizes),
    ]
    _refuse(schedule, faults)
    if circle := deadlock(dependencies_of(schedule, joined.values())):
        _refuse(schedule, [circle])
    return schedule


class _Row:
    """What devices that do the same run, and what they hold."""

    def __init__(self, devices: Devices, schedule: Schedule) -> None:
        self.name = _device_label(devices)
        self.devices = devices
        self.steps = schedule.devices[devices[0]]
        self.stages = frozenset(schedule.held_by(devices[0]))
        self.place = {step: at for at, step in enumerate(self.steps) if step.stage in self.stages}


def _refuse(schedule: Schedule, faults: list[str]) -> None:
    more = [f"and {len(faults) - MOST_FAULTS} more"] if len(faults) > MOST_FAULTS else []
    raise_all(ScheduleError, f"the schedule {schedule} can't run:", faults[:MOST_FAULTS] + more)


def _odd_edges(schedule: Schedule, edges: dict[tuple[int, int], StageEdge]) -> Iterator[str]:
    for source, target in edges:
        if not 0 <= min(source, target) <= max(source, target) < schedule.stages:
            yield f"a value crosses from stage {source} to {target}; there are only 0 to {schedule.stages - 1}"
        elif source >= target:
            yield f"a value crosses from stage {source} to {target}; values cross to later stages only"


def _misplaced(schedule: Schedule, rows: list[_Row]) -> Iterator[str]:
    """Steps that their device has nothing to do with, and those that it runs twice."""
    for row in rows:
        for step, times in Counter(row.steps).items():
            if step.stage not in row.stages:
                known = 0 <= step.stage < schedule.stages
                where = f"lies on {_device_label(schedule.holders[step.stage])}" if known else "there is none"
                yield f"{row.name}: {step} is of stage {step.stage}, which it does not have ({where})"
            elif not 0 <= step.microbatch < (1 if step.kind == "P" else schedule.microbatches):
                why = "a prologue has microbatch 0" if step.kind == "P" else "there is no such microbatch"
                yield f"{row.name}: {step} is too much, {why}"
            elif times > 1:
                yield f"{row.name}: {step} runs {times} times, every step runs once"


def _missing(schedule: Schedule, rows: list[_Row]) -> Iterator[str]:
    """Every F and every B must be there, and a P or W that is anywhere on all devices of its stage."""
    needed: tuple[StepKind, ...] = ("F",) if schedule.inference else ("F", "B")
    wanted: list[set[Step]] = [
        {Step(kind, stage, at) for kind in needed for at in range(schedule.microbatches)}
        for stage in range(schedule.stages)
    ]
    for row in rows:
        for step in row.steps:
            if 0 <= step.stage < schedule.stages:
                wanted[step.stage].add(step)
    for row in rows:
        for stage in sorted(row.stages):
            for step in sorted(wanted[stage].difference(row.place), key=_natural):
                yield f"{row.name}: {step} is missing, it has stage {stage}"
    if schedule.inference:
        for step in sorted(step for steps in wanted for step in steps if step.kind == "W"):
            yield f"{step} has no B{step.stage}.{step.microbatch}, and W is a part of a backward"


def _natural(step: Step) -> tuple[int, int]:
    return step.microbatch, STEP_KINDS.index(step.kind)


def _out_of_order(schedule: Schedule, rows: list[_Row], edges: dict[tuple[int, int], StageEdge]) -> Iterator[str]:
    """Steps of one device of which the later one makes what the earlier one needs."""
    for row in rows:
        own = sorted(row.stages)
        needs: list[tuple[StepKind, int, StepKind, int]] = [
            (first, stage, then, stage) for stage in own for first, then in pairwise(STEP_KINDS)
        ]
        for edge in edges.values():
            if edge.source in row.stages and edge.target in row.stages:
                needs.append(("F", edge.source, "F", edge.target))
                if edge.backward is not None:
                    needs.append(("B", edge.target, "B", edge.source))
        for kind, source, then, target in needs:
            for at in range(schedule.microbatches):
                first = Step(kind, source, 0 if kind == "P" else at)
                second = Step(then, target, at)
                if row.place.get(second, len(row.steps)) < row.place.get(first, 0):
                    yield f"{row.name}: {second} comes before {first}, which it needs"


def _disagreeing(rows: list[_Row]) -> Iterator[str]:
    """Devices that have stages in common and run the steps of these in different orders."""
    for first, other in combinations(rows, 2):
        if common := first.stages & other.stages:
            both = [
                [step for step in mine.place if step.stage in common and step in its.place]
                for mine, its in ((first, other), (other, first))
            ]
            if both[0] != both[1]:
                left, right = next((left, right) for left, right in zip(*both, strict=True) if left != right)
                yield (
                    f"{first.name} runs {left} where {other.name} runs {right}: devices run the steps of stages that "
                    f"they share in the same order"
                )


def _too_full(
    schedule: Schedule,
    rows: list[_Row],
    limit: float | Sequence[float] | None,
    sizes: Sequence[MicrobatchMemory] | None,
) -> Iterator[str]:
    if limit is None:
        return
    if sizes is None or len(sizes) != schedule.stages:
        known = 0 if sizes is None else len(sizes)
        raise ScheduleError(f"a limit of memory needs the sizes of {schedule.stages} stages; {known} are given")
    for row in rows:
        most, step = fullest([step for step in row.steps if step.stage in row.stages], sizes)
        allowed = limit if isinstance(limit, int | float) else min(limit[device] for device in row.devices)
        if most > allowed:
            yield (
                f"{row.name}: saves {most:,.0f} bytes for backward after {step}, the limit is {allowed:,.0f}; let it "
                f"have fewer microbatches in flight, make them smaller, or recompute"
            )


def deadlock(wiring: Dependencies) -> str | None:
    """The devices that wait for each other in a circle, or None if every step gets its turn."""
    waits, microbatches = list(wiring.waits), wiring.microbatches
    todo = [row[0] for row in wiring.rows if row]
    todo = [number for number in dict.fromkeys(todo) if not waits[number]]
    done: set[int] = set()
    while todo:
        number = todo.pop()
        done.add(number)
        following = [*wiring.after[number], *(number + m.offset for m in wiring.sends[number // microbatches])]
        for other in following:
            waits[other] -= 1
            if not waits[other]:
                todo.append(other)
    heads = [next((number for number in row if number not in done), None) for row in wiring.rows]
    stuck = next((group for group, head in enumerate(heads) if head is not None), None)
    return None if stuck is None else _circle(wiring, heads, done, stuck)


def _circle(wiring: Dependencies, heads: list[int | None], done: set[int], group: int) -> str:
    """From a device that stands still to the one that it waits for, until one comes again."""
    legs: dict[int, str] = {}
    while group not in legs:
        head = heads[group]
        assert head is not None
        wanted = next((source for source in wiring.sources(head) if source not in done), head)
        holding = [other for other, row in enumerate(wiring.rows) if wanted in row]
        late = next((other for other in holding if heads[other] != wanted), holding[0])
        here, there = (_device_label(wiring.groups[at]) for at in (group, late))
        legs[group] = f"{here} stands at {wiring.step(head)} until {there} runs {wiring.step(wanted)}"
        group = late
    circle = list(legs.values())[list(legs).index(group) :]
    shown = circle if len(circle) <= 6 else [*circle[:3], f"({len(circle) - 5} more)", *circle[-2:]]
    return f"deadlock: {'; '.join(shown)}"


def _device_label(devices: Devices) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {show_devices(devices)}"

"""The script of one rank: its steps, each with the messages that it posts receives for, sends and needs.

Messages have no tags: what a rank sends to another is received in the order of the sender's steps.
So the steps of every sender are gone through once, and receives are posted in that order, those of a
step one step ahead of it:

    rank 0 (sends)      F0.0  F0.1  F0.2  B0.0 ..            h.0  h.1  h.2
    rank 1 (receives)   post h.0, h.1 | F1.0, post h.2 | B1.0 ..

A receive that is needed late may have to be posted early, if others follow it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

from shardwright.errors import ScheduleError
from shardwright.schedule import Schedule, Step, StepKind

from .routes import Route, routes
from .spec import PipelineSpec, StageCrossing

WHOLE_STEP = "PFBW"
AHEAD = 1  # steps between posting a receive and its use


@dataclass(frozen=True, slots=True)
class ReceivedMessage:
    """One message to this rank: of a crossing and a microbatch, the value (F) or its gradient (B)."""

    kind: StepKind
    crossing: int
    microbatch: int
    leg: Route


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptStep:
    """One step of this rank."""

    step: Step
    asks: tuple[ReceivedMessage, ...]  # receives to post before the step runs
    sends: tuple[tuple[int, tuple[Route, ...]], ...]  # (crossing, routes) after it has run
    takes: tuple[int, ...]  # the crossings whose value (in an F) or gradient (in a B) it needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """The steps of one rank, in order."""

    rank: int
    turns: tuple[ScriptStep, ...]
    apart: frozenset[int]  # the stages whose weight gradients are separate steps
    orderly: bool  # on all ranks, microbatch by microbatch


def legs_of(pipeline: PipelineSpec, crossing: StageCrossing, kind: StepKind) -> tuple[Route, ...]:
    """The routes of a value to its receiver (F), or of its gradient back (B)."""
    sender, receiver = pipeline.placed[crossing.sender].mesh, pipeline.placed[crossing.receiver].mesh
    if kind == "F":
        return routes(crossing.source_layout, sender, crossing.target_layout, receiver, crossing.shape)
    return routes(crossing.target_layout, receiver, crossing.source_layout, sender, crossing.shape)


def pairs_of(pipeline: PipelineSpec) -> set[tuple[int, int]]:
    """The (sender, receiver) of all messages there may be."""
    pairs: set[tuple[int, int]] = set()
    for crossing in pipeline.crossings:
        kinds: tuple[StepKind, ...] = ("F", "B") if crossing.gradient else ("F",)
        for kind in kinds:
            pairs.update((leg.source, leg.target) for leg in legs_of(pipeline, crossing, kind))
    return {(source, target) for source, target in pairs if source != target}


def only(schedule: Schedule, kinds: str) -> Schedule:
    """The same schedule with steps of some kinds alone: "PF" for the forward half, "BW" for the other."""
    steps_of = {id(steps): tuple(step for step in steps if step.kind in kinds) for steps in schedule.devices}
    return replace(schedule, devices=tuple(steps_of[id(steps)] for steps in schedule.devices))


def write(
    pipeline: PipelineSpec,
    schedule: Schedule,
    rank: int,
    kinds: str = WHOLE_STEP,
    seeded: frozenset[int] | None = None,
) -> Script:
    """The script of a rank, for steps of some kinds. `seeded` are the outputs that have a gradient; None: all."""
    seeded = frozenset(range(len(pipeline.leaving))) if seeded is None else seeded
    own_steps = schedule.devices[rank] if rank < len(schedule.devices) else ()
    apart = frozenset(step.stage for step in own_steps if step.kind == "W")
    schedule = only(schedule, kinds)
    steps = tuple(step for step in own_steps if step.kind in kinds)
    sends: dict[tuple[StepKind, int], list[tuple[int, tuple[Route, ...]]]] = defaultdict(list)
    takes: dict[tuple[StepKind, int], list[int]] = defaultdict(list)
    for number, crossing, kind, sender, receiver in _transfers(pipeline, seeded):
        legs = tuple(leg for leg in legs_of(pipeline, crossing, kind) if leg.source == rank)
        if legs:
            sends[kind, sender].append((number, legs))
        takes[kind, receiver].append(number)
    asks = _asks(pipeline, schedule, rank, steps, seeded)
    turns = [
        ScriptStep(
            step=step,
            asks=tuple(asks[at]),
            sends=tuple(sends.get((step.kind, step.stage), ())),
            takes=tuple(takes.get((step.kind, step.stage), ())),
        )
        for at, step in enumerate(steps)
    ]
    return Script(rank=rank, turns=tuple(turns), apart=apart, orderly=_orderly(schedule))


def _orderly(schedule: Schedule) -> bool:
    """Whether a rank may wait until its messages have arrived: all ranks run the microbatches in the same order.

    Then every rank can finish a microbatch without messages of a later one.
    """
    microbatches = {id(order): [step.microbatch for step in order if step.kind != "P"] for order in schedule.devices}
    return all(order == sorted(order) for order in microbatches.values())


def _transfers(
    pipeline: PipelineSpec, seeded: frozenset[int]
) -> Iterator[tuple[int, StageCrossing, StepKind, int, int]]:
    """(number, crossing, kind, sending stage, receiving stage) for values and their gradients."""
    for number, crossing in enumerate(pipeline.crossings):
        yield number, crossing, "F", crossing.sender, crossing.receiver
        if crossing.has_gradient(seeded):
            yield number, crossing, "B", crossing.receiver, crossing.sender


def _asks(
    pipeline: PipelineSpec, schedule: Schedule, rank: int, steps: tuple[Step, ...], seeded: frozenset[int]
) -> list[list[ReceivedMessage]]:
    """For each step the receives to post before it."""
    at = {step: place for place, step in enumerate(steps)}
    arriving: dict[int, dict[tuple[StepKind, int], list[tuple[int, Route, int]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for number, crossing, kind, sender, receiver in _transfers(pipeline, seeded):
        for leg in legs_of(pipeline, crossing, kind):
            if leg.target == rank != leg.source:
                arriving[leg.source][kind, sender].append((number, leg, receiver))
    asks: list[list[ReceivedMessage]] = [[] for _ in steps]
    for source in sorted(arriving):
        latest = []  # for each message in the sender's order, the position of the step that needs it
        messages = []
        for step in schedule.devices[source]:
            for number, leg, receiver in arriving[source].get((step.kind, step.stage), ()):
                needed = at.get(Step(step.kind, receiver, step.microbatch))
                if needed is None:
                    raise ScheduleError(
                        f"{schedule.name}: rank {source} sends {pipeline.crossings[number].value} after {step}, and "
                        f"rank {rank} has no step {step.kind}{receiver}.{step.microbatch} that receives it"
                    )
                latest.append(needed)
                messages.append(ReceivedMessage(step.kind, number, step.microbatch, leg))
        for place in range(len(latest) - 2, -1, -1):  # receives are posted in order
            latest[place] = min(latest[place], latest[place + 1])
        for needed, message in zip(latest, messages, strict=True):
            asks[max(0, needed - AHEAD)].append(message)
    return asks

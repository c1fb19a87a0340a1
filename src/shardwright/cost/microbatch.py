"""The memory of a rank that runs segments of a pipeline, microbatch by microbatch.

One microbatch of a segment is a walk through its steps (`peak.Timeline`). A rank has, at its worst moment:

    parameters, states     those of its segments
    gradients              a copy aside, to which microbatches add, and the buckets in which devices sum them
    activations            what autograd keeps of each microbatch in flight, and what was received for it
    one microbatch         what comes and goes while it runs; a receive buffer is filled meanwhile
    inputs                 the whole batch, on every rank

After the schedule the activations are gone, and what is aside is summed, or becomes .grad.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..layout import Layout, Mesh
from ..rules import Analysis
from ..schedule import Kept, Schedule, in_flight
from .fusing import fuse
from .heap import ACTIVATION
from .peak import Memory, Timeline
from .rank import Choices, Storage, steps_of
from .training import Habits, Training


@dataclass(frozen=True, slots=True, kw_only=True)
class Walked:
    """What a segment needs on a rank, in bytes.

    aside       gradients that microbatches add to
    summed      gradients in the buckets of their sync, or as ZeRO leaves them
    kept        of a microbatch, from its forward to its backward
    received    of a microbatch, the values that came from other segments
    queued      of a microbatch, from its backward until the gradients of parameters are made
    over        what comes and goes while a microbatch runs, beside what it keeps
    update      what the update needs beside all that stays
    """

    parameters: float
    optimizer: float
    aside: float
    summed: float
    inputs: float
    kept: float
    received: float
    queued: float
    over: float
    update: float
    at: tuple[str, str]


def walk_segment(
    facts: Analysis,
    mesh: Mesh,
    choices: Choices,
    storage: Storage,
    training: Training,
    recompute: Sequence[str],
    borders: Mapping[str, Layout],
    *,
    time: str,
    habits: Habits,
    queued: float = 0.0,
) -> Walked:
    """One microbatch of a segment.

    mesh       with the axis in time
    time       the name of that axis
    borders    how values lie that cross
    """
    program = fuse(steps_of(facts, mesh, choices, storage, training, recompute, habits, borders))
    held = [replace(one, level=1) if one.level == 2 else one for one in program.held]
    program.held[:] = [replace(one, sums=(time,)) if one.level < 3 and one.trainable else one for one in held]
    line = Timeline(program, training, habits)
    heap = line.heap
    start = heap.total
    line.forward()
    kept = heap.now[ACTIVATION]
    line.backward()
    at = heap.where
    line.update()
    trained = [one for one in held if one.trainable]
    synced = [one for one in trained if set(one.sums) - {time} and one.level < 3]
    received = sum(program.tensors[number].bytes for number in _received(facts, borders))
    return Walked(
        parameters=sum(one.kept for one in held),
        optimizer=training.states() * sum(one.share for one in trained),
        aside=sum(one.bytes if one.level < 3 else one.share for one in trained),
        summed=sum(one.bytes for one in synced),
        inputs=program.inputs + program.constants,
        kept=kept,
        received=received,
        queued=min(queued, kept),
        over=max(heap.peaks["forward"], heap.peaks["backward"]) - start - kept,
        update=max(0.0, heap.peaks["update"] - start),
        at=at,
    )


def _received(facts: Analysis, borders: Mapping[str, Layout]) -> list[int]:
    """The first tensors of a program are its inputs, in order."""
    names = [held.value for held in facts.graph.inputs]
    return [number for number, name in enumerate(names) if name in borders]


def rank_memory(schedule: Schedule, device: int, segments: Mapping[int, Walked]) -> Memory:
    """The peak of a device under a schedule, given its segments by number."""
    sizes = [Kept(0.0, 0.0)] * schedule.segments
    for number, held in segments.items():
        sizes[number] = Kept(held.kept + held.received, held.queued)
    every = list(segments.values())
    flying = in_flight(schedule, sizes)[device]
    most = max(every, key=lambda held: held.over)
    parameters, optimizer, aside, summed = (
        sum(getattr(held, kind) for held in every) for kind in ("parameters", "optimizer", "aside", "summed")
    )
    inputs = max(held.inputs for held in every)
    received = max(held.received for held in every)
    base = parameters + optimizer + inputs
    running = base + aside + summed + flying + most.over + received
    leaving = aside + summed
    update = base + leaving + max(held.update for held in every)
    during = running >= update
    return Memory(
        parameters=parameters,
        gradients=aside + summed if during else leaving,
        optimizer=optimizer,
        activations=flying if during else 0.0,
        buffers=most.over + received if during else update - base - leaving,
        inputs=inputs,
        at=most.at if during else ("optimizer.step", "update"),
        forward=running,
        backward=running,
        update=update,
    )

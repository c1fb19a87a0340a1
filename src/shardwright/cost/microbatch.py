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
from ..schedule import MicrobatchMemory, Schedule, in_flight
from .fusing import fuse
from .heap import ACTIVATION
from .memory_timeline import MemoryPeak, MemoryTimeline
from .rank_program import Choices, ParameterMemory, Storage, steps_of
from .training import BackendTraits, TrainingSetup

NOTHING = MicrobatchMemory(0.0, 0.0)

TIED = 2.0
"""Copies of the gradient of a parameter that ranks of several stages hold: what is sent, and what is received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a segment needs on a rank, in bytes.

    held        its parameters, as the rank holds them
    kept        of a microbatch, from its forward to its backward
    received    of a microbatch, the values that came from other segments
    queued      of a microbatch, from its backward until the gradients of parameters are made
    over        what comes and goes while a microbatch runs, beside what it keeps
    update      what the update needs beside all that stays
    """

    held: tuple[ParameterMemory, ...]
    inputs: float
    kept: float
    received: float
    queued: float
    over: float
    update: float
    at: tuple[str, str]


def simulate_stage_memory(
    analysis: Analysis,
    mesh: Mesh,
    choices: Choices,
    storage: Storage,
    training: TrainingSetup,
    recompute: Sequence[str],
    borders: Mapping[str, Layout],
    *,
    time: str,
    traits: BackendTraits,
    queued: float = 0.0,
) -> StageMemory:
    """One microbatch of a segment.

    mesh       with the axis in time
    time       the name of that axis
    borders    how values lie that cross
    """
    program = fuse(steps_of(analysis, mesh, choices, storage, training, recompute, traits, borders))
    held = [replace(one, level=1) if one.level == 2 else one for one in program.held]
    program.held[:] = [replace(one, sums=(time,)) if one.level < 3 and one.trainable else one for one in held]
    line = MemoryTimeline(program, training, traits)
    heap = line.heap
    start = heap.total
    line.forward()
    kept = heap.now[ACTIVATION]
    line.backward()
    at = heap.where
    line.update()
    received = sum(program.tensors[number].bytes for number in _received(analysis, borders))
    return StageMemory(
        held=tuple(replace(one, sums=tuple(axis for axis in one.sums if axis != time)) for one in held),
        inputs=program.inputs + program.constants,
        kept=kept,
        received=received,
        queued=min(queued, kept),
        over=max(heap.peaks["forward"], heap.peaks["backward"]) - start - kept,
        update=max(0.0, heap.peaks["update"] - start),
        at=at,
    )


def _received(analysis: Analysis, borders: Mapping[str, Layout]) -> list[int]:
    """The first tensors of a program are its inputs, in order."""
    names = [held.value for held in analysis.graph.inputs]
    return [number for number, name in enumerate(names) if name in borders]


def rank_memory(schedule: Schedule, device: int, walked: Sequence[StageMemory], training: TrainingSetup) -> MemoryPeak:
    """The peak of a device under a schedule, given what all segments need."""
    own = [number for number, devices in enumerate(schedule.holders) if device in devices]
    segments = [walked[number] for number in own]
    sizes = [
        MicrobatchMemory(one.kept + one.received, one.queued) if at in own else NOTHING for at, one in enumerate(walked)
    ]
    flying = in_flight(schedule, sizes)[device]
    held = {one.key: one for segment in segments for one in segment.held}  # what two segments share is there once
    elsewhere = {one.key for at, segment in enumerate(walked) if at not in own for one in segment.held}
    trained = [one for one in held.values() if one.trainable]
    aside = sum((one.bytes if one.level < 3 else one.share) * one.wider for one in trained)
    summed = sum(one.bytes for one in trained if one.sums and one.level < 3)
    summed += TIED * sum(one.bytes for one in trained if one.key in elsewhere)
    parameters = sum(one.kept for one in held.values())
    optimizer = sum(one.states for one in trained)
    most = max(segments, key=lambda one: one.over)
    inputs, received = (max(getattr(one, kind) for one in segments) for kind in ("inputs", "received"))
    base = parameters + optimizer + inputs + aside + summed
    running = base + flying + most.over + received
    update = base + max(one.update for one in segments)
    during = running >= update
    return MemoryPeak(
        parameters=parameters,
        gradients=aside + summed,
        optimizer=optimizer,
        activations=flying if during else 0.0,
        buffers=most.over + received if during else update - base,
        inputs=inputs,
        at=most.at if during else ("optimizer.step", "update"),
        forward=running,
        backward=running,
        update=update,
    )

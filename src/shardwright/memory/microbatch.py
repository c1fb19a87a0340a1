"""The memory of a rank that runs stages of a pipeline, microbatch by microbatch.

One microbatch of a stage is a memory simulation of its steps (`MemoryTimeline`). A rank has, at its peak:

    parameters, states     those of its stages
    gradients              a copy aside, to which microbatches add, and the buckets in which devices sum them
    activations            what is saved for backward of each microbatch in flight, and what was received for it
    one microbatch         transient memory while it runs; a receive buffer is filled meanwhile
    inputs                 the whole batch, on every rank

After the schedule the activations are gone, and what is aside is summed, or becomes .grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..cost.training import BackendTraits, TrainingSetup
from ..layout import MB
from ..lower import LoweredProgram
from ..schedule import MicrobatchMemory, Schedule, Step, in_flight, saved_after
from .heap import ACTIVATION
from .rank_program import ParameterMemory, read_program
from .timeline import MemoryPeak, MemoryTimeline

NOTHING = MicrobatchMemory(0.0, 0.0)

TIED = 2.0
"""Copies of the gradient of a parameter that ranks of several stages hold: what is sent, and what is received."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """What a stage needs on a rank, in bytes.

    parameters  as the rank stores them
    saved       of a microbatch, from its forward to its backward
    received    of a microbatch, the values that came from other stages
    queued      of a microbatch, from its backward until the gradients of parameters are made
    over        transient memory while a microbatch runs, beside what it saves
    update      what the update needs beside all that stays
    """

    parameters: tuple[ParameterMemory, ...]
    inputs: float
    saved: float
    received: float
    queued: float
    over: float
    update: float
    at: tuple[str, str]


def simulate_stage_memory(
    lowered: LoweredProgram, training: TrainingSetup, traits: BackendTraits, queued: float = 0.0
) -> StageMemory:
    """One microbatch of a stage. `queued`: bytes from its backward until the gradients of parameters are made."""
    program = read_program(lowered, training, traits)
    parameters = [
        parameter
        if (accumulating := parameter.storage.while_accumulating()) is parameter.storage
        else replace(parameter, storage=accumulating)
        for parameter in program.parameters
    ]
    program.parameters[:] = [
        parameter if parameter.storage.shards_parameter or not parameter.trainable else replace(parameter, sums=(MB,))
        for parameter in parameters
    ]
    line = MemoryTimeline(program, training, traits)
    heap = line.heap
    start = heap.total
    line.forward()
    saved = heap.now[ACTIVATION]
    line.backward()
    at = heap.where
    line.update()
    return StageMemory(
        parameters=tuple(parameters),
        inputs=program.inputs + program.constants,
        saved=saved,
        received=program.received,
        queued=min(queued, saved),
        over=max(heap.peaks["forward"], heap.peaks["backward"]) - start - saved,
        update=max(0.0, heap.peaks["update"] - start),
        at=at,
    )


class RankMemorySample(NamedTuple):
    """Bytes on a rank while it runs one step of its schedule, beside what lives through all of it."""

    step: Step
    activations: float  # of the microbatches in flight
    buffers: float  # transient memory of the one that runs


def rank_memory_over_step(
    schedule: Schedule, device: int, simulated: Sequence[StageMemory]
) -> tuple[RankMemorySample, ...]:
    """What the steps of a device need, one after the other; the highest is the peak of `rank_memory` before the update.

    A forward counts what it saves from its start on, a backward to its end.
    """
    own = [number for number, devices in enumerate(schedule.holders) if device in devices]
    transient = max(simulated[number].over for number in own) + max(simulated[number].received for number in own)
    samples: list[RankMemorySample] = []
    sizes = _sizes(simulated, own)
    flying = saved_after(schedule.devices[device], sizes)
    before = 0.0
    for step, after in zip(schedule.devices[device], flying, strict=True):
        samples.append(RankMemorySample(step, max(before, after), transient))
        before = after
    return tuple(samples)


def _sizes(simulated: Sequence[StageMemory], own: Sequence[int]) -> list[MicrobatchMemory]:
    return [
        MicrobatchMemory(item.saved + item.received, item.queued) if at in own else NOTHING
        for at, item in enumerate(simulated)
    ]


def rank_memory(
    schedule: Schedule, device: int, simulated: Sequence[StageMemory], training: TrainingSetup
) -> MemoryPeak:
    """The peak of a device under a schedule, given what all stages need."""
    own = [number for number, devices in enumerate(schedule.holders) if device in devices]
    stages = [simulated[number] for number in own]
    flying = in_flight(schedule, _sizes(simulated, own))[device]
    by_key = {item.key: item for stage in stages for item in stage.parameters}  # tied parameters count once
    elsewhere = {item.key for at, stage in enumerate(simulated) if at not in own for item in stage.parameters}
    trained = [item for item in by_key.values() if item.trainable]
    aside = sum(item.stored * item.wider for item in trained)
    summed = sum(item.bytes for item in trained if item.sums and not item.storage.shards_parameter)
    summed += TIED * sum(item.bytes for item in trained if item.key in elsewhere)
    parameters = sum(item.stored for item in by_key.values())
    optimizer = sum(item.states for item in trained)
    most = max(stages, key=lambda item: item.over)
    inputs, received = (max(getattr(item, kind) for item in stages) for kind in ("inputs", "received"))
    base = parameters + optimizer + inputs + aside + summed
    running = base + flying + most.over + received
    update = base + max(item.update for item in stages)
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

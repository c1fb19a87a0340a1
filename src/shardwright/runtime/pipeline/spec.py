"""The parts of a pipeline, as the compiler produces them: stages, crossings, outputs.

    stage 0                  stage 1                  stage 2
    PlacedStage  ── h ────▶  PlacedStage  ── y ────▶  PlacedStage  ── loss ──▶ PipelineOutput
                 └─ mask ──────────────────────────▶
                    StageCrossing (one per value and receiver)

All ranks have the same `PipelineSpec`, but a rank has a program (`stage`) only for the stages
whose mesh it is in. Shapes are those of one microbatch. Inputs of the model are replicated on
every rank and are not sent. Nothing here runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from shardwright.errors import LayoutError, raise_all
from shardwright.layout import INVARIANT, Layout, Mesh, Shard
from shardwright.schedule import Schedule

from ..model.program import Program
from ..parameters.forward_writes import write_parameter
from ..parameters.sharded import ShardedParameter
from ..world import Moment

How = Literal["sum", "mean", "cat", "same"]
"""How an output is combined over microbatches: added up, averaged, joined along a dim, or any of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCrossing:
    """A value that one stage computes and another reads. Gradients take the reverse route, in the same layouts."""

    value: str
    sender: int
    receiver: int
    shape: tuple[int, ...]  # of one microbatch, before sharding
    dtype: torch.dtype
    gradient: bool
    source_layout: Layout  # on the sender's mesh: sharded or replicated on each axis
    target_layout: Layout  # on the receiver's mesh
    outputs: frozenset[int] | None = None  # indices of outputs whose gradients reach it; None: any may

    def has_gradient(self, seeded: frozenset[int]) -> bool:
        """Whether a gradient comes back if only these outputs of the model have one."""
        return self.gradient and (self.outputs is None or not self.outputs.isdisjoint(seeded))

    def __post_init__(self) -> None:
        faults = []
        if self.sender == self.receiver:
            faults.append(f"it is sent from stage {self.sender} to itself")
        for side, layout in (("source", self.source_layout), ("target", self.target_layout)):
            if len(layout.shards) != len(self.shape):
                faults.append(f"its {side} layout has {len(layout.shards)} dims, but its shape is {self.shape}")
            if any(placement != INVARIANT for _, placement in layout.rest):
                faults.append(f"its {side} layout is {layout}; reduce pending sums before a value crosses")
        if self.gradient and not self.dtype.is_floating_point and not self.dtype.is_complex:
            faults.append(f"a value of {self.dtype} has no gradient")
        raise_all(LayoutError, f"value {self.value} can't cross like this:", faults)


@dataclass(frozen=True, kw_only=True)
class PlacedStage:
    """A stage on its mesh. `stage` and `parameters` are set on the ranks of that mesh."""

    number: int
    mesh: Mesh
    takes: tuple[int | str, ...]  # for each argument of forward, the number of a model input or a crossing value
    gives: tuple[str, ...]  # for each tensor that forward returns, the value's name
    asks: tuple[int, ...] = ()  # for each argument of prologue, the number of a model input
    updates: tuple[str, ...] = ()  # the keys of buffers and parameters that its forward may update
    stage: Program | None = None
    parameters: Mapping[str, ShardedParameter] = field(default_factory=dict)  # by all keys under which it finds them


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOutput:
    """An output tensor of the model, replicated on the stage's ranks, per microbatch."""

    value: str
    stage: int
    how: How
    shape: tuple[int, ...]  # of the full batch
    dtype: torch.dtype
    gradient: bool
    path: str = ""  # its path in the model's output, such as "loss" or "1"
    dim: int = 0  # for "cat"
    sharding: Shard | None = None  # for "cat", of the full dim into microbatches; None: contiguous

    def __post_init__(self) -> None:
        if self.how == "cat" and not -len(self.shape) <= self.dim < len(self.shape):
            raise LayoutError(f"output {self.path or self.value} of shape {self.shape} has no dim {self.dim} to join")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """Everything that one specialization of a model runs."""

    placed: tuple[PlacedStage, ...]  # by number
    crossings: tuple[StageCrossing, ...]
    leaving: tuple[PipelineOutput, ...]  # in output order
    schedule: Schedule  # of a training step
    forward: Schedule  # without backward
    moment: Moment  # the running microbatch; the stages have it as `mb`
    buffers: Mapping[str, Tensor] = field(default_factory=dict)  # all of the model's, replicated on every rank
    local: bool = False  # each microbatch is an independent batch: buffers are updated after each
    rows: tuple[bool, ...] = ()  # then, for each input of the model, whether it is split into microbatches

    def write(self, placed: PlacedStage, key: str, value: Tensor) -> None:
        """A new value for a buffer or a parameter, which the forward of a stage has made."""
        if key in self.buffers:
            self.buffers[key].copy_(value)
        else:
            write_parameter(placed.parameters[key], value)

    @property
    def microbatches(self) -> int:
        return self.moment.size

    def __post_init__(self) -> None:
        faults = []
        numbers = [placed.number for placed in self.placed]
        if numbers != list(range(len(self.placed))):
            faults.append(f"stages are numbered {numbers}")
        produced = {(placed.number, value) for placed in self.placed for value in placed.gives}
        for crossing in self.crossings:
            if (crossing.sender, crossing.value) not in produced:
                faults.append(f"stage {crossing.sender} does not give {crossing.value}, which crosses from it")
        for out in self.leaving:
            if (out.stage, out.value) not in produced:
                faults.append(f"stage {out.stage} does not give {out.value}, which the model returns")
        crossed = {(crossing.receiver, crossing.value) for crossing in self.crossings}
        for placed in self.placed:
            for source in placed.takes:
                if isinstance(source, str) and (placed.number, source) not in crossed:
                    faults.append(f"stage {placed.number} takes {source}, which does not cross to it")
        for schedule in (self.schedule, self.forward):
            if schedule.microbatches != self.microbatches:
                faults.append(f"{schedule.name} has {schedule.microbatches} microbatches, not {self.microbatches}")
        raise_all(LayoutError, "the parts of a pipeline don't fit together:", faults)

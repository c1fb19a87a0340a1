"""A program that is ready to run, and what a rank holds for all programs."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from shardwright.errors import InputError

from ..algorithms.random import Randomness
from ..faults.input_comparison import CallSignature
from ..parameters import state_dicts
from ..parameters.forward_writes import write_parameter
from ..parameters.gradient_sync import GradientSync
from ..parameters.sharded import ShardedParameter
from ..parameters.spec import ParameterSpec
from ..pipeline import RunningPipeline
from ..world import Groups
from .program import Program


@dataclass(frozen=True, kw_only=True)
class Specialization:
    """A program that is ready to run, with the way in and out: a stage, or a pipeline of several."""

    path: Path
    flatten: Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]
    unflatten: Callable[[Sequence[Tensor | None]], Any]
    literals: tuple[bool, ...]  # for each output, whether it is a literal
    per_replica: tuple[bool, ...] = ()  # for each output, whether it is this group's rows
    dtypes: tuple[tuple[str, str], ...] = ()  # (path, dtype) of every input
    shared: tuple[str, ...] = ()  # for each output its path, if the model computes with it itself (shared_outputs.py)
    signature: CallSignature
    stage: Program | None = None
    running: RunningPipeline | None = None

    @property
    def stages(self) -> list[Program]:
        """The programs of this rank."""
        if self.running is None:
            return [self.stage] if self.stage is not None else []
        return [placed.stage for placed in self.running.pipeline.placed if placed.stage is not None]


@dataclass(kw_only=True)
class RankState:
    """What a rank holds: pieces, buffers, and what keeps them right. Made when the model is first compiled."""

    groups: Groups
    specs: list[ParameterSpec]
    parameters: dict[str, ShardedParameter]  # by first key
    buffers: dict[str, Tensor]
    sync: GradientSync | None
    zero: Any
    random: Randomness
    replica_axes: tuple[str, ...]
    persistent: tuple[str, ...] = ()  # the keys of buffers that a state dict has
    pp_ranks: state_dicts.Seats = ()  # of a pipeline: for each mesh what its ranks hold
    empty: set[str] = field(default_factory=set)  # first keys of what was on meta and has no values yet

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        return {key: self.buffers[key] for key in self.persistent}

    def write(self, key: str, value: Tensor) -> None:
        """A new value for a buffer or a parameter, which forward has made."""
        if key in self.buffers:
            self.buffers[key].copy_(value)
        else:
            write_parameter(self.parameters[key], value)

    def filled(self, keys: Container[str]) -> None:
        """What has these keys has values."""
        self.empty -= {spec.name for spec in self.specs if any(key in keys for key in spec.keys)}

    def check_filled(self) -> None:
        if self.empty:
            some = ", ".join(sorted(self.empty)[:4])
            raise InputError(
                f"{len(self.empty)} parameters were on meta and have no values yet ({some}); load them first: "
                "shardwright.checkpoint.load_weights(path, model), sw.load, or model.load_state_dict"
            )

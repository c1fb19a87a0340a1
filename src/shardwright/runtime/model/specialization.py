"""A specialization that is ready to run, and the state of a rank shared by all of them."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.storage import ParameterSpec

from ..algorithms.random import Randomness
from ..faults.input_comparison import CallSignature
from ..parameters import state_dicts
from ..parameters.forward_writes import write_parameter
from ..parameters.gradient_sync import GradientSync
from ..parameters.sharded import ShardedParameter
from ..pipeline import RunningPipeline
from ..world import Groups
from .program import Program


@dataclass(frozen=True, kw_only=True)
class Specialization:
    """A program that is ready to run, with its inputs and outputs: without stages, or a pipeline."""

    path: Path
    flatten: Callable[[Sequence[Any], Mapping[str, Any]], list[Tensor]]
    unflatten: Callable[[Sequence[Tensor | None]], Any]
    literals: tuple[bool, ...]  # for each output, whether it is a literal
    per_replica: tuple[bool, ...] = ()  # for each output, whether it has this replica's samples
    dtypes: tuple[tuple[str, str], ...] = ()  # (path, dtype) of every input
    shared: tuple[str, ...] = ()  # for each output its path, if the model also uses it itself (shared_outputs.py)
    padding: tuple[tuple[int, int], ...] = ()  # inputs that tell of padding, and the number that says there is none
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
    """The state of a rank: shards, buffers and their sync. Created when the model is first compiled."""

    groups: Groups
    specs: list[ParameterSpec]
    parameters: dict[str, ShardedParameter]  # by first key
    buffers: dict[str, Tensor]
    sync: GradientSync | None
    zero: Any
    random: Randomness
    replica_axes: tuple[str, ...]
    persistent: tuple[str, ...] = ()  # the keys of buffers in the state dict
    pp_ranks: state_dicts.Seats = ()  # of a pipeline: the contents of each mesh
    empty: set[str] = field(default_factory=set)  # first keys of parameters from meta without values yet

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        return {key: self.buffers[key] for key in self.persistent}

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters that are trained and not now: on all ranks the same ones, or gradients would not meet."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple([name for name, parameter in self.parameters.items() if not parameter.requires_grad])

    def write(self, key: str, value: Tensor) -> None:
        """A new value for a buffer or a parameter, which forward has made."""
        if key in self.buffers:
            self.buffers[key].copy_(value)
        else:
            write_parameter(self.parameters[key], value)

    def filled(self, keys: Container[str]) -> None:
        """Note that these keys have values now."""
        self.empty -= {spec.name for spec in self.specs if any(key in keys for key in spec.keys)}

    def check_filled(self) -> None:
        if self.empty:
            some = ", ".join(sorted(self.empty)[:4])
            raise InputError(
                f"{len(self.empty)} parameters were on meta and have no values yet ({some}); load them first: "
                "shardwright.checkpoint.load_weights(path, model), sw.load, or model.load_state_dict"
            )

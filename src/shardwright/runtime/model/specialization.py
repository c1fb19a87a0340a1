"""What the compiler and the model hand to each other, and the state of a rank.

ModelCall        a call without a program yet, and what the model is when it is made       model -> compiler
CompiledCall     its program and all that comes with it; the model installs it             compiler -> model
Specialization   a program that is ready to run, one for each kind of call
RankState        the shards of this rank, shared by all specializations
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.errors import InputError
from shardwright.storage import ParameterSpec

from ..algorithms.random import Randomness
from ..faults.input_comparison import CallSignature
from ..optimizer.adopt import Optimizers
from ..parameters import state_dicts
from ..parameters.forward_writes import write_parameter
from ..parameters.gradient_sync import GradientSync
from ..parameters.sharded import ShardedParameter
from ..pipeline import RunningPipeline
from ..world import Groups, World
from .guards import Watchable
from .inputs import CallInputs, Mode
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
    pp_ranks: state_dicts.PipelineRankSpecs = ()  # of a pipeline: the contents of each mesh
    empty: set[str] = field(default_factory=set)  # first keys of parameters from meta without values yet

    @property
    def saved_buffers(self) -> dict[str, Tensor]:
        return {key: self.buffers[key] for key in self.persistent}

    @property
    def frozen(self) -> tuple[str, ...]:
        """The parameters that are trained and not now: on all ranks the same ones, or gradients would not meet."""
        with torch._C.DisableTorchFunctionSubclass():
            return tuple([name for name, parameter in self.parameters.items() if not parameter.requires_grad])

    @property
    def data_rank(self) -> int:
        """Which data-parallel replica this rank is in."""
        place = 0
        for axis in self.replica_axes:
            place = place * self.groups.mesh.sizes[axis] + self.groups[axis].index
        return place

    @property
    def data_size(self) -> int:
        """The number of data-parallel replicas."""
        return math.prod(self.groups.mesh.sizes[axis] for axis in self.replica_axes)

    def state_dict(self) -> dict[str, Any]:
        return state_dicts.state_dict(self.specs, self.parameters, self.saved_buffers, self.groups)

    def full_state_dict(self, rank: int | None = None) -> dict[str, Tensor]:
        """Everything whole, on every rank or on one."""
        return state_dicts.full_state_dict(
            self.specs, self.parameters, self.saved_buffers, self.groups, rank, self.pp_ranks
        )

    def load(self, values: Mapping[str, Any], strict: bool = True) -> Any:
        """Load whole tensors or shards; which keys were missing or strange."""
        elsewhere = [key for _, specs in self.pp_ranks for spec in specs for key in spec.keys]
        keys = state_dicts.load_state(
            values, self.specs, self.parameters, self.saved_buffers, self.groups, strict, elsewhere
        )
        self.filled(values)
        return keys

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
                "shardwright.checkpoint.load_weights(path, model), sw.load, or model.load_state_dict; or draw them: "
                "shardwright.initialization.initialize(model, seed=0)"
            )


@dataclass(frozen=True, kw_only=True)
class ModelCall:
    """A call to compile, and what the model is when it is made.

    skeleton    the model on meta, its submodules in the modes of this call
    floats      leaves of the call that are passed as tensors, with their values
    unpadded    the program is for batches in which inputs tell of no padding
    passing     what the call passes
    plan        of the calls so far
    state       of this rank, once anything was compiled
    gather      gathers all values of the model; all ranks must call it
    """

    skeleton: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    method: str = ""
    floats: Mapping[int, float] = field(default_factory=dict)
    unpadded: bool = False
    training: bool
    passing: Mode
    plan: Any
    state: RankState | None
    gather: Callable[[], Mapping[str, Tensor]]


@dataclass(frozen=True, kw_only=True)
class ReplacedParameters:
    """The parameters of the original by name, and the shard that stands for each (None: it is on other ranks)."""

    originals: Mapping[str, nn.Parameter]
    shards: Mapping[nn.Parameter, ShardedParameter | None]


@dataclass(frozen=True, kw_only=True)
class CompiledCall:
    """What compiling a call gives, for the model to install.

    plan        with the entry of this call
    flops       of the matmuls of a training call, forward and backward, over all ranks; else None
    state       of this rank: a new one from the first call, later the one that there is
    replaced    with a new state: the parameters of the original, and what stands for each
    reads, variables   what the program takes for constant: attributes of modules, and variables
    left        attributes that the call would set
    """

    specialization: Specialization
    plan: Any
    flops: float | None
    state: RankState
    replaced: ReplacedParameters | None = None
    reads: Iterable[tuple[str, str]] = ()
    variables: Iterable[Watchable] = ()
    left: Iterable[str] = ()


class ModelCompiler(Protocol):
    """Compiles the calls of a model.

    skeleton     the original on meta
    original     the model as the user wrote it, until the first call is compiled
    cache_size   how many specializations the model keeps
    """

    skeleton: nn.Module
    original: nn.Module | None
    optimizer: Optimizers
    world: World
    mode: Mode
    random: Randomness
    call_inputs: CallInputs
    cache_size: int

    def __call__(self, call: ModelCall) -> CompiledCall:
        """The program of a call, of forward or of another method."""

    def renew(self, skeleton: nn.Module) -> nn.Module:
        """The skeleton of the original as it is now."""

    def carry(self, skeleton: nn.Module, shown: nn.Module, path: str, name: str, value: Any) -> None:
        """An attribute of what the user sees was changed."""

    def register(self, arguments: Any) -> None:
        """Have torch look into objects that are passed."""

"""Run a program op by op on this rank, without the generated file, and record every value.

Each value, and each use of a value by an op, becomes a tensor of its own that retains its
gradient, so that the op at which a gradient went wrong can be found afterwards. Slow and plain
on purpose; `debug.py` compares what comes out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import runtime
from ..capture import CapturedGraph, ImportedFunction
from ..capture.interpret import filled, run_op
from ..errors import ParityError
from ..ir import Op, Slot
from ..layout import Layout, local_region
from ..lower import LoweredProgram, Size
from ..lower.program import graph_value
from ..ops import spec_of
from ..ops.contexts import GROUP_ARGUMENTS, RuntimeArguments
from ..ops.user_calls import OPAQUE
from ..rules import is_random
from ..runtime import Group, Groups
from ..runtime.algorithms.experts import experts
from ..runtime.algorithms.random import Randomness
from ..runtime.collectives import comm

Use = tuple[str, str, int]
"""An op, the graph's name of a value that it reads, and which of its readings of it (x * x has two)."""

Call = Callable[[Op, Sequence[Tensor]], Sequence[Tensor | None]]


@dataclass(frozen=True, kw_only=True)
class ObservedValues:
    """Every value of a run, and every use of one."""

    values: dict[str, Tensor]
    uses: dict[Use, Tensor]


def step_through(ops: Iterable[Op], start: Mapping[str, Tensor], call: Call) -> ObservedValues:
    """Run ops one after the other from the values that there are."""
    values = dict(start)
    uses: dict[Use, Tensor] = {}
    for op in ops:
        seen: Counter[str] = Counter()
        inputs = []
        for name in op.inputs:
            base = graph_value(name)
            inputs.append(_own(values[name]))
            uses[op.name, base, seen[base]] = inputs[-1]
            seen[base] += 1
        try:
            outputs = call(op, inputs)
        except RuntimeError as error:
            shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(op.inputs, inputs, strict=True))
            raise ParityError(f"{op} can't run on its shards ({shapes}): {error}") from error
        for name, tensor in zip(op.outputs, outputs, strict=True):
            if tensor is not None:
                values[name] = _own(tensor)
    return ObservedValues(values=values, uses=uses)


def _own(tensor: Tensor) -> Tensor:
    """The same value as a tensor that retains the gradient of this use alone."""
    if not tensor.requires_grad:
        return tensor
    alias = tensor.view_as(tensor)
    alias.retain_grad()
    return alias


class ProgramInterpreter:
    """A program on this rank. Parameters and buffers are passed in full, and sharded here."""

    def __init__(
        self, program: LoweredProgram, captured: CapturedGraph, random: Randomness, device: torch.device
    ) -> None:
        self.program, self.captured, self.random, self.device = program, captured, random, device
        wanted = {
            axes
            for op in program.ops
            for key in GROUP_ARGUMENTS
            if isinstance(axes := op.argument(key), tuple) and axes
        }
        self.groups = Groups(program.mesh, sorted(wanted))
        self.at = {name: self.groups[name].index for name in program.mesh.names}

    def run(
        self, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]
    ) -> ObservedValues:
        """Every value that the program makes of these inputs."""
        program, graph = self.program, self.program.graph
        start = {source.value: self.shard(x, source.value) for source, x in zip(graph.inputs, inputs, strict=True)}
        for spec in program.parameters:
            local = shard_tensor(parameters[spec.name].detach(), spec.layout, program, self.at)
            start[spec.value] = local.requires_grad_(spec.trainable and local.is_floating_point())
        for buffer in graph.buffers:
            constant = self.captured.constants.get(buffer.value)
            start[buffer.value] = buffers[buffer.key] if constant is None else constant.to(self.device)
        with torch.no_grad():
            fixed = step_through(program.constants, start, self.call)
        return step_through(program.body, fixed.values, self.call)

    def shard(self, tensor: Tensor, value: str) -> Tensor:
        local = shard_tensor(tensor.detach(), self.program.layouts[value], self.program, self.at)
        return local.requires_grad_(tensor.requires_grad)

    def outputs(self, watched: ObservedValues) -> Any:
        """What the model returns."""
        return self.captured.unflatten(
            [None if name is None else watched.values[name] for name in self.program.outputs]
        )

    def call(self, op: Op, tensors: Sequence[Tensor]) -> Sequence[Tensor | None]:
        runs = spec_of(op.target).runs
        if runs is not None:
            result = runs(self, _Arguments(replace(op, arguments=self._local(op.arguments)), tensors))
            outputs = result if isinstance(result, tuple) else (result,)
            return outputs[: len(op.outputs)]
        key = op.argument("op_key") if op.target == OPAQUE else op.name if is_random(op) else None
        with self.random.drawing(key) if key is not None else nullcontext():
            return run_op(replace(op, arguments=self._local(op.arguments)), tensors, self._functions)

    @property
    def _functions(self) -> Mapping[str, ImportedFunction]:
        return self.captured.functions

    def _local(self, argument: Any) -> Any:
        """Arguments with this rank's sizes."""
        if isinstance(argument, Size):
            return argument.local(self.program.mesh.sizes, self.at)
        return tuple(self._local(inner) for inner in argument) if isinstance(argument, tuple) else argument

    # What ops of the runtime are run with (`RankRun`).

    runtime, comm, experts = runtime, comm, staticmethod(experts)

    def group(self, axes: str | tuple[str, ...] | None) -> Group | None:
        return self.groups[axes] if axes else None

    def call_custom(self, function: Callable[..., Any], arguments: RuntimeArguments) -> Any:
        op = replace(arguments.op, arguments=self._local(arguments.op.arguments))
        return custom_call(function, op, arguments.tensors)

    def call_opaque(self, arguments: RuntimeArguments, tensors: tuple[Any, ...]) -> Any:
        state = tuple(arguments[name] for name in ("names", "state"))
        passed = (arguments["op_key"], arguments["batch"], arguments["rule"], tensors, *state)
        return self._functions[OPAQUE].call(*passed)[0]


def custom_call(call: Callable[..., Any], op: Op, tensors: Sequence[Tensor]) -> Any:
    """Call an own algorithm with the arguments of its op."""
    pairs = [(name, filled(value, tensors)) for name, value in op.argument("given")]
    return call(*(value for name, value in pairs if not name), **{name: value for name, value in pairs if name})


class _Arguments:
    """An op's arguments by name, tensors filled in, None for what was not given."""

    def __init__(self, op: Op, tensors: Sequence[Tensor]) -> None:
        self.op, self.tensors = op, tensors

    def __getitem__(self, name: str) -> Any:
        return self.get(name)

    def get(self, name: str, default: Any = None) -> Any:
        value = self.op.argument(name, default)
        if isinstance(value, tuple):
            return tuple(self.tensors[inner.index] if isinstance(inner, Slot) else inner for inner in value)
        return self.tensors[value.index] if isinstance(value, Slot) else default if value is None else value


def shard_tensor(tensor: Tensor, layout: Layout, program: LoweredProgram, at: Mapping[str, int]) -> Tensor:
    """The shard of a full tensor that the rank at some coordinates has."""
    region = local_region(layout, tensor.shape, program.mesh.sizes, at)
    local = tensor.new_empty(region.local_shape)
    for source, here, sizes in region.boxes:
        local[_slices(here, sizes)] = tensor[_slices(source, sizes)]
    return local


def unshard_tensor(
    shards: Sequence[Tensor], layout: Layout, shape: Sequence[int], program: LoweredProgram
) -> list[Tensor] | None:
    """The full tensor from the shards of all ranks, once for each replica; None if a shard has a wrong shape.

    Sharded axes are joined, partial ones are reduced, and every coordinate on the other axes is a replica.
    """
    mesh = program.mesh
    copies: dict[tuple[int, ...], Tensor] = {}
    reduction = next((placement.op for _, placement in layout.rest if hasattr(placement, "op")), "sum")
    first = {"sum": 0.0, "max": -torch.inf, "min": torch.inf}[reduction]
    for rank, local in zip(mesh.devices, shards, strict=True):
        at = mesh.coordinates(rank)
        region = local_region(layout, shape, mesh.sizes, at)
        if region.local_shape != tuple(local.shape):
            return None
        wide = local.detach().to(torch.complex128 if local.is_complex() else torch.float64)
        key = tuple(at[name] for name in mesh.names if name not in layout.axes or _is_copied(layout, name))
        full = copies.setdefault(key, wide.new_full(tuple(shape), first))
        for target, here, sizes in region.boxes:
            place, part = _slices(target, sizes), wide[_slices(here, sizes)]
            if reduction == "sum":
                full[place] += part
            else:
                full[place] = (torch.maximum if reduction == "max" else torch.minimum)(full[place], part)
    return list(copies.values())


def _is_copied(layout: Layout, axis: str) -> bool:
    placement = layout.placement(axis)
    return placement is not None and not hasattr(placement, "op")


def _slices(start: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(at, at + size) for at, size in zip(start, sizes, strict=True))

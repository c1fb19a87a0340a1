"""Run a graph op by op with torch: the reference that everything compiled is compared with.

Slow and plain on purpose. Autograd works through it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from ..errors import GraphError, InputError, LoweringError
from ..ir import Dtype, Graph, Op, Slot
from .captured import CapturedGraph, ImportedFunction

Callback = Callable[[Op, tuple[torch.Tensor, ...], tuple[torch.Tensor, ...]], None]


def run(
    captured: CapturedGraph | Graph,
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    functions: Mapping[str, ImportedFunction] | None = None,
    *,
    callback: Callback | None = None,
) -> tuple[list[torch.Tensor | None], dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """(one entry per output, None for a literal; new values of buffers and parameters by key; every value by name)."""
    graph = captured.graph if isinstance(captured, CapturedGraph) else captured
    constants = captured.constants if isinstance(captured, CapturedGraph) else {}
    known = {**(captured.functions if isinstance(captured, CapturedGraph) else {}), **(functions or {})}
    device = _accelerator((*inputs, *parameters.values(), *buffers.values()))
    if device is not None:
        constants = {name: constant.to(device) for name, constant in constants.items()}
    values = _start(graph, inputs, parameters, buffers, constants)
    for op in graph.ops:
        op_inputs = tuple(values[name] for name in op.inputs)
        op_outputs = run_op(op, op_inputs, known)
        if device is not None and not op_inputs:  # graphs have no devices: what an op makes from nothing is on the CPU
            op_outputs = tuple(tensor.to(device) for tensor in op_outputs)
        if len(op_outputs) != len(op.outputs):
            raise GraphError(f"{op} gave {len(op_outputs)} values, and the graph has {len(op.outputs)}")
        values.update(zip(op.outputs, op_outputs, strict=True))
        if callback is not None:
            callback(op, op_inputs, op_outputs)
    outputs = [None if output.value is None else values[output.value] for output in graph.outputs]
    updates = {key: values[update] for key, update in graph.updates()}
    return outputs, updates, values


def run_plain(
    graph: Graph, inputs: Sequence[torch.Tensor], functions: Mapping[str, ImportedFunction]
) -> list[torch.Tensor]:
    """What a graph without parameters and buffers makes of its inputs: a branch, or the turn of a loop."""
    outputs, _, _ = run(graph, inputs, {}, {}, functions)
    return [tensor for tensor in outputs if tensor is not None]


def _accelerator(tensors: Sequence[torch.Tensor]) -> torch.device | None:
    """The accelerator that a graph is run on; None on the CPU and for tensors without values."""
    return next((tensor.device for tensor in tensors if tensor.device.type not in ("cpu", "meta")), None)


def _start(
    graph: Graph,
    inputs: Sequence[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
    buffers: Mapping[str, torch.Tensor],
    constants: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    if len(inputs) != len(graph.inputs):
        raise InputError(f"{graph.name} takes {len(graph.inputs)} tensors, got {len(inputs)}")
    values = {graph_input.value: tensor for graph_input, tensor in zip(graph.inputs, inputs, strict=True)}
    for parameter in graph.parameters:
        values[parameter.value] = _first(parameter.keys, parameters)
    for buffer in graph.buffers:
        values[buffer.value] = constants[buffer.value] if buffer.value in constants else _first((buffer.key,), buffers)
    return values


def _first(keys: Sequence[str], tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    for key in keys:
        if key in tensors:
            return tensors[key]
    raise InputError(f"no tensor was given for {keys[0]}")


def run_op(
    op: Op, tensors: Sequence[torch.Tensor], functions: Mapping[str, ImportedFunction]
) -> tuple[torch.Tensor, ...]:
    arguments = {name: filled(value, tensors) for name, value in op.arguments}
    with ExitStack() as stack:
        if op.no_grad:
            stack.enter_context(torch.no_grad())
        if op.autocast:
            device, dtype = op.autocast.split(":")
            stack.enter_context(torch.autocast(device, getattr(torch, dtype)))
        if op.target.startswith("call."):
            result = functions[op.target].call(*arguments.values())
        else:
            result = overload_of(op)(**arguments)
    results = result if isinstance(result, tuple | list) else (result,)
    return tuple(tensor for tensor in results if isinstance(tensor, torch.Tensor))


def overload_of(op: Op) -> Any:
    if op.target.count(".") != 2:
        raise LoweringError(f"{op} can't be run here: it is no op of torch, and its definition in ops/ has no `runs`")
    space, name, overload = op.target.split(".")
    return getattr(getattr(getattr(torch.ops, space), name), overload)


def filled(value: Any, tensors: Sequence[torch.Tensor]) -> Any:
    """An argument with tensors in its slots, as torch wants it."""
    if isinstance(value, Slot):
        return tensors[value.index]
    if isinstance(value, Dtype):
        return getattr(torch, value)
    if isinstance(value, tuple):
        return [filled(inner, tensors) for inner in value]
    return value

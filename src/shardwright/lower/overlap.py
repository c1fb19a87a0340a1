"""Passes for speed: all_reduce in place, overlapped with compute, or awaited only when read."""

from __future__ import annotations

from dataclasses import replace

from ..ir import Op, Value
from ..ir.graph import Slot
from ..layout import replicated
from ..ops import spec_of
from ..ops.losses import COUNTED
from .label_counts import count_op, from_inputs, with_label_count
from .program import LoweredProgram

LINEARS = {"replicate": "runtime.replicate_linears", "all_gather_to_r": "runtime.all_gather_linears"}
_RESHARDS = {target: kind for kind, target in LINEARS.items()}


def reshard_kind(op: Op) -> str | None:
    """The kind of reshard that an op is or contains; None if it sends nothing of its own."""
    return op.target.removeprefix("comm.") if op.target.startswith("comm.") else _RESHARDS.get(op.target)


def count_early(program: LoweredProgram) -> LoweredProgram:
    """Labels that come from the inputs alone are sharded and counted first, so that their count travels meanwhile."""
    makers = {name: op for op in program.body for name in op.outputs}
    parameters = {holding.value for holding in program.parameters}
    values, layouts = dict(program.values), dict(program.layouts)
    first: dict[str, Op] = {}
    changed: dict[str, Op] = {}
    for op in program.body:
        if op.target not in COUNTED or not op.argument("samples") or op.argument("count") is not None:
            continue
        labels = from_inputs(op.inputs[op.argument("target").index], makers, parameters)
        weight = op.argument("weight")
        if labels is None or op.argument("reduction", 1) != 1 or (weight and op.inputs[weight.index] in makers):
            continue
        count = count_op(op, "runtime.begin_count", over=op.argument("samples"))
        (name,) = count.outputs
        values[name], layouts[name] = Value(name=name, shape=(), dtype="int64"), replicated(0)
        changed[op.name] = with_label_count(op, name)
        first |= {counted.name: counted for counted in (*labels, count)}
    rest = (changed.get(op.name, op) for op in program.body if op.name not in first)
    return program.with_(body=(*first.values(), *rest), values=values, layouts=layouts)


def awaited_later(program: LoweredProgram) -> LoweredProgram:
    """The sum of a number that leaves the program and that no op reads is awaited when the user looks at it."""
    if program.stepped:
        return program
    users, needed = program.users(), {name for name in program.outputs if name is not None}

    def for_the_user(op: Op) -> bool:
        (out,) = op.outputs
        return out in needed and out not in users and not program.values[out].shape and program.values[out].gradient

    body = tuple(
        op.with_arguments(later=True) if op.target == "comm.all_reduce" and for_the_user(op) else op
        for op in program.body
    )
    return program.with_(body=body)


def in_place(program: LoweredProgram) -> LoweredProgram:
    """A partial sum that only the reshard reads is summed where it stands."""
    makers = {name: op for op in program.body for name in op.outputs}
    users, needed = program.users(), program.needed()

    def only_reader(op: Op) -> bool:
        source = op.inputs[0]
        alone = len(users[source]) == 1 and source not in needed
        return source in makers and alone and spec_of(makers[source].target).fresh

    body = tuple(
        op.with_arguments(in_place=True) if op.target == "comm.all_reduce" and only_reader(op) else op
        for op in program.body
    )
    return program.with_(body=body)


def put_off(program: LoweredProgram) -> LoweredProgram:
    """Where backward is in two steps, matmuls with parameters compute their weight gradients in the second."""
    if not program.puts_off:
        return program
    trainable = {holding.value for holding in program.parameters if holding.trainable}

    def later(op: Op) -> bool:
        known = op.target.endswith(".default") and spec_of(op.target).delays_weights and not op.argument("transposed")
        return known and op.autocast is None and not op.no_grad and any(name in trainable for name in op.inputs)

    body = tuple(replace(op, target=f"weights.{op.target}") if later(op) else op for op in program.body)
    return program.with_(body=body)


def overlap(program: LoweredProgram) -> LoweredProgram:
    """A value whose gradient is a pending sum, and the linears that alone read it, become one op."""
    users, needed = program.users(), program.needed()
    parameters = {holding.value for holding in program.parameters}
    joined: dict[str, Op] = {}
    gone: set[str] = set()
    for op in program.body:
        readers = users.get(op.outputs[0], [])
        if reshard_kind(op) not in LINEARS or op.outputs[0] in needed or not program.values[op.outputs[0]].gradient:
            continue
        if readers and all(_is_layer(reader, op.outputs[0], parameters) for reader in readers) and _alike(op, readers):
            joined[readers[0].name] = _joined(op, readers)
            gone.update((op.name, *(reader.name for reader in readers[1:])))
    return program.with_(body=tuple(joined.get(op.name, op) for op in program.body if op.name not in gone))


def _is_layer(op: Op, x: str, parameters: set[str]) -> bool:
    """Whether an op is a linear of a value with parameters, which are there from the start."""
    return (
        op.target == "aten.linear.default" and op.inputs[0] == x and all(name in parameters for name in op.inputs[1:])
    )


def _alike(reshard: Op, readers: list[Op]) -> bool:
    """Whether all run in one mode. What is gathered before a recompute region is not gathered again in it."""
    if reshard.region != readers[0].region:
        return False
    return len({(op.region, op.autocast, op.no_grad) for op in readers}) == 1 and not readers[0].no_grad


def _joined(reshard: Op, layers: list[Op]) -> Op:
    inputs: list[str] = [*reshard.inputs]
    columns: dict[str, list[Slot | None]] = {"weight": [], "bias": []}
    for op in layers:
        for key, column in columns.items():
            slot = op.argument(key)
            column.append(Slot(len(inputs)) if isinstance(slot, Slot) else None)
            if isinstance(slot, Slot):
                inputs.append(op.inputs[slot.index])
    biases = tuple(columns["bias"]) if any(columns["bias"]) else None
    arguments = (("input", Slot(0)), *reshard.arguments, ("weights", tuple(columns["weight"])), ("biases", biases))
    return replace(
        layers[0],
        target=LINEARS[reshard.target.removeprefix("comm.")],
        inputs=tuple(inputs),
        outputs=tuple(name for op in layers for name in op.outputs),
        arguments=arguments,
    )

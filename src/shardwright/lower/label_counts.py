"""Labels that count: what they are made of, and the op that counts them before the loss."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Op
from ..ir.graph import Slot


def from_inputs(value: str, makers: Mapping[str, Op], stored: set[str] | frozenset[str]) -> list[Op] | None:
    """The ops that make a value of the inputs alone, in order; None if something else (`stored`) is needed."""
    if value not in makers:
        return None if value in stored else []
    op, ops = makers[value], dict[str, Op]()
    if op.region is not None or not op.target.startswith(("aten.", "comm.shard", "comm.partial")):
        return None
    for name in op.inputs:
        before = from_inputs(name, makers, stored)
        if before is None:
            return None
        ops |= {op.name: op for op in before}
    return [*ops.values(), op]


def count_op(loss: Op, target: str, *, over: tuple[str, ...] = ()) -> Op:
    """The op that counts the labels of a loss, by weight if there is one, over some axes."""
    slots = [(key, loss.argument(key)) for key in ("target", "weight") if loss.argument(key) is not None]
    arguments: list[tuple[str, object]] = [(key, Slot(at)) for at, (key, _) in enumerate(slots)]
    arguments += [("samples", over)] if over else []
    ignored = loss.argument("ignore_index")
    arguments += [("ignore_index", ignored)] if ignored is not None else []
    return replace(
        loss,
        name=f"{loss.name} count",
        region=None,
        target=target,
        inputs=tuple(loss.inputs[slot.index] for _, slot in slots),
        outputs=(f"count@{loss.outputs[0]}",),
        arguments=tuple(arguments),
    )


def with_label_count(loss: Op, name: str, **changes: object) -> Op:
    """A loss that is given its count."""
    return replace(loss, inputs=(*loss.inputs, name)).with_arguments(count=Slot(len(loss.inputs)), **changes)

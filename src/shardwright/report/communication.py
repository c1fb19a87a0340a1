"""What a program communicates: its collectives by kind and axis, with counts and bytes, forward and backward.

Bytes are those of the tensor that a rank passes to a collective or gets from it, whichever is
larger. What crosses the wire depends on the algorithm and is not counted here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from ..ir.graph import ITEM_SIZE
from ..layout import MB, REPLICATE, Layout
from ..lower import LoweredProgram, reshard_kind
from ..reshard import COLLECTIVES
from ..storage import ParameterSpec, StoredElements


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuedCollective:
    """One collective of a step."""

    when: str  # "forward", "backward", "once a step"
    collective: str
    axes: tuple[str, ...]
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveTotal:
    """Collectives of one kind over the same axes."""

    when: str
    collective: str
    axes: tuple[str, ...]
    count: int
    bytes: int


def totals(program: LoweredProgram) -> tuple[CollectiveTotal, ...]:
    """The collectives of one training step, added up, in the order forward, backward, once a step."""
    sums: dict[tuple[str, str, tuple[str, ...]], list[int]] = {}
    for sent in (*_of_reshards(program), *_of_parameters(program)):
        sums.setdefault((sent.when, sent.collective, sent.axes), []).append(sent.bytes)
    order = {"forward": 0, "backward": 1, "once a step": 2}
    return tuple(
        CollectiveTotal(when=when, collective=collective, axes=axes, count=len(numbers), bytes=sum(numbers))
        for (when, collective, axes), numbers in sorted(sums.items(), key=lambda item: (order[item[0][0]], item[0]))
    )


KEEP_NOTHING = frozenset(
    "add sub neg clone view reshape _unsafe_view transpose permute split split_with_sizes unbind chunk slice select "
    "unsqueeze squeeze expand t contiguous".split()
)
"""Ops whose backward reads no value."""


def runs_again(program: LoweredProgram) -> set[str]:
    """The ops that are recomputed in backward: those of a region up to the last one that saves a tensor."""
    names: set[str] = set()
    pending: dict[str, list[str]] = {}
    for op in program.body:
        if op.region is not None:
            pending.setdefault(op.region, []).append(op.name)
            keeps = not op.target.startswith("comm.") and op.target.split(".")[1] not in KEEP_NOTHING
            if keeps and any(program.values[name].gradient for name in op.outputs):
                names.update(pending.pop(op.region))
    return names


def _of_reshards(program: LoweredProgram) -> Iterator[IssuedCollective]:
    again = runs_again(program)
    for op in program.body:
        kind = reshard_kind(op)
        if kind is None:
            continue
        forward, backward = COLLECTIVES[kind]
        value, axes = program.values[op.inputs[0]], tuple(axis for axis in op.argument("axes") if axis != MB)
        if not axes:
            continue  # from microbatch to microbatch nothing is sent
        size = _local_bytes(program, value.shape, value.dtype, program.layouts[op.inputs[0]])
        if kind in ("all_gather", "all_gather_to_r"):
            size *= math.prod(program.mesh.sizes[axis] for axis in axes)
        if forward:
            yield IssuedCollective(when="forward", collective=forward, axes=axes, bytes=size)
        if forward and op.name in again and program.graph.entry.startswith("train"):
            yield IssuedCollective(when="backward", collective=forward, axes=axes, bytes=size)
        if backward and value.gradient and program.graph.entry.startswith("train"):
            yield IssuedCollective(when="backward", collective=backward, axes=axes, bytes=size)


def _of_parameters(program: LoweredProgram) -> Iterator[IssuedCollective]:
    """Once a step: gradient sync and ZeRO's gathers (at run time coalesced into buckets)."""
    if not program.graph.entry.startswith("train"):
        return
    for spec in program.parameters:
        size = parameter_bytes(program, spec)
        share = math.ceil(size / spec.storage.parts(program.mesh.sizes))
        axes = [axis for axis in program.mesh.names if axis != MB]
        sums = tuple(axis for axis in axes if spec.layout.placement(axis) == REPLICATE)
        for sent in spec.storage.collectives(sums, spec.trainable, backward=True):
            size_sent = share if sent.of_share else size
            yield IssuedCollective(when="once a step", collective=sent.collective, axes=sent.axes, bytes=size_sent)


def parameter_bytes(program: LoweredProgram, spec: ParameterSpec) -> int:
    """Bytes of a parameter's local shard in compute."""
    return _local_bytes(program, spec.shape, spec.dtype, spec.layout)


def stored_bytes(program: LoweredProgram, spec: ParameterSpec) -> StoredElements:
    """Bytes that a rank stores of a parameter, of its gradient, and of each tensor of its optimizer state."""
    return spec.storage.stored(parameter_bytes(program, spec), spec.storage.parts(program.mesh.sizes))


def _local_bytes(program: LoweredProgram, shape: tuple[int, ...], dtype: str, layout: Layout) -> int:
    first = dict.fromkeys(program.mesh.names, 0)
    return math.prod(layout.local_shape(shape, program.mesh.sizes, first)) * ITEM_SIZE.get(dtype, 4)


def format_bytes(size: float) -> str:
    """A size with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"

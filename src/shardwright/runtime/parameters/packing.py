"""Many shares in one buffer: the memory that ZeRO's collectives work on.

Each parameter of a pack is cut among the `parts` ranks of a group. One collective for all
of them wants the shares of a rank next to each other:

    row 0   | share 0 of a | share 0 of b | .. |      row i is what rank i owns,
    row 1   | share 1 of a | share 1 of b | .. |      each share padded to the largest

`put` writes a whole tensor into the rows, `take` reads it back, `own` is a rank's share
as a view on its row. Nothing here communicates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from shardwright.layout import Layout, local_region
from shardwright.storage import ParameterSpec, storage_layout

Box = tuple[tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSlot:
    """One parameter in a pack: where its shares lie in a row, and which box of it each rank owns."""

    shape: tuple[int, ...]
    start: int
    width: int
    boxes: tuple[Box, ...]
    contiguous: bool  # plain equal runs of the first dim: one strided copy does it

    def owned(self, full: Tensor, index: int) -> Tensor:
        """A rank's share as a view on the whole tensor."""
        for dim, (start, length) in enumerate(zip(*self.boxes[index], strict=True)):
            full = full.narrow(dim, start, length)
        return full


class Pack:
    """The shares of several parameters, cut over the same axes, as rows of one buffer."""

    def __init__(
        self,
        specs: Sequence[ParameterSpec],
        axes: tuple[str, ...],
        sizes: Mapping[str, int],
        at: Mapping[str, int],
        extra: int = 0,
    ) -> None:
        self.parts = math.prod(sizes[axis] for axis in axes)
        self.slots: list[PackSlot] = []
        start = 0
        for spec in specs:
            slot = make_slot(spec, axes, sizes, at, start)
            self.slots.append(slot)
            start += slot.width
        self.used = start
        self.width = start + extra
        self.padded = any(not slot.contiguous for slot in self.slots)

    def by_rank(self, flat: Tensor) -> Tensor:
        """A flat buffer of parts * width elements, as rows."""
        return flat.view(self.parts, self.width)

    def put(self, buffer: Tensor, number: int, full: Tensor) -> None:
        """Write a whole tensor into its slot. Padding is left as it is."""
        slot = self.slots[number]
        if slot.contiguous:
            into = buffer.narrow(1, slot.start, slot.width)
            into.copy_(full.reshape(self.parts, slot.width))
            return
        for index in range(self.parts):
            self.own(buffer[index], number, index).copy_(slot.owned(full, index))

    def take(self, buffer: Tensor, number: int, out: Tensor) -> None:
        """Read a whole tensor out of its slot, into `out`."""
        slot = self.slots[number]
        if slot.contiguous:
            out.view(self.parts, slot.width).copy_(buffer.narrow(1, slot.start, slot.width))
            return
        for index in range(self.parts):
            slot.owned(out, index).copy_(self.own(buffer[index], number, index))

    def own(self, row: Tensor, number: int, index: int) -> Tensor:
        """The share of rank `index` as a view on its row."""
        slot = self.slots[number]
        shape = slot.boxes[index][1]
        return row.narrow(0, slot.start, math.prod(shape)).view(shape)


def make_slot(
    spec: ParameterSpec, axes: tuple[str, ...], sizes: Mapping[str, int], at: Mapping[str, int], start: int = 0
) -> PackSlot:
    """Where the shares of one parameter's compute shard lie, when sharded over `axes`."""
    shape = spec.layout.local_shape(spec.shape, sizes, at)
    storage = storage_layout(spec, sizes)
    shards = tuple(tuple(sharding for sharding in dim if sharding.axis in axes) for dim in storage.shards)
    further = Layout(shards=shards)
    boxes = []
    for place in product(*(range(sizes[axis]) for axis in axes)):
        region = local_region(further, shape, sizes, dict(zip(axes, place, strict=True)))
        boxes.append((tuple(runs[0][0] if runs else 0 for runs in region.spans), region.local_shape))
    numels = [math.prod(lengths) for _, lengths in boxes]
    order = [sharding.axis for sharding in shards[0]] if shards else []
    return PackSlot(
        shape=shape,
        start=start,
        width=max(numels),
        boxes=tuple(boxes),
        contiguous=order == list(axes) and len(set(numels)) == 1,
    )


def whole_buffer(slots: Sequence[PackSlot], like: Tensor) -> tuple[Tensor, list[Tensor]]:
    """One flat buffer for the whole tensors of the slots, and a view on it for each."""
    lengths = [math.prod(slot.shape) for slot in slots]
    flat = like.new_empty(sum(lengths))
    views = [part.view(slot.shape) for part, slot in zip(torch.split(flat, lengths), slots, strict=True)]
    return flat, views

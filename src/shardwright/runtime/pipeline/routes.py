"""Which rank sends what to whom when a tensor moves from one mesh and layout to another.

Every rank of the target mesh gets every element of its shard exactly once, from a rank that
has it. Where several ranks have the same shard, a rank that already has it takes its own, and the
others are spread over the senders, the first receiver to the first sender:

    source: sharded over tp, on ranks 0 1       target: replicated, on ranks 2 3 4
    rank 0  a   ──▶ 2, 3, 4                     rank 2  a b
    rank 1  b   ──▶ 2, 3, 4                     rank 3  a b   ..

A gradient goes the same way with the sides swapped. Nothing is sent here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from shardwright.layout import Layout, LocalRegion, Mesh, local_region

Spans = tuple[tuple[int, int, int], ...]
"""Runs along one dim: (start at the sender, start at the receiver, length)."""


@dataclass(frozen=True, slots=True)
class Box:
    """A box of elements: its start at the sender and at the receiver, and its sizes."""

    source: tuple[int, ...]
    target: tuple[int, ...]
    sizes: tuple[int, ...]

    def of_source(self, x: Tensor) -> Tensor:
        return _narrow(x, self.source, self.sizes)

    def of_target(self, x: Tensor) -> Tensor:
        return _narrow(x, self.target, self.sizes)


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends to another: one message, its boxes concatenated."""

    source: int
    target: int
    boxes: tuple[Box, ...]
    same: bool  # the receiver gets exactly the sender's tensor, in the same order

    @property
    def elements(self) -> int:
        return sum(math.prod(box.sizes) for box in self.boxes)

    def pack(self, x: Tensor) -> Tensor:
        """The message, contiguous: the tensor itself if possible."""
        if self.same:
            return x.contiguous()
        views = [box.of_source(x) for box in self.boxes]
        return views[0].contiguous() if len(views) == 1 else torch.cat([view.reshape(-1) for view in views])

    def straight(self, out: Tensor) -> Tensor | None:
        """The memory in `out` that the message can be received into, if any."""
        if self.same:
            return out
        view = self.boxes[0].of_target(out)
        return view if len(self.boxes) == 1 and view.is_contiguous() else None

    def unpack(self, message: Tensor, out: Tensor) -> None:
        """Copy a message from its buffer to its destination."""
        flat, at = message.view(-1), 0
        for box in self.boxes:
            size = math.prod(box.sizes)
            box.of_target(out).copy_(flat.narrow(0, at, size).view(box.sizes))
            at += size

    def carry(self, x: Tensor, out: Tensor) -> None:
        """Copy from the sender's tensor to the receiver's, if both are on this rank."""
        for box in self.boxes:
            box.of_target(out).copy_(box.of_source(x))


def _narrow(x: Tensor, starts: Sequence[int], sizes: Sequence[int]) -> Tensor:
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if x.shape[dim] != size:
            x = x.narrow(dim, start, size)
    return x


@lru_cache(maxsize=4096)
def routes(
    source_layout: Layout, sender: Mesh, target_layout: Layout, receiver: Mesh, shape: tuple[int, ...]
) -> tuple[Route, ...]:
    """All messages, by receiver and then sender, including those of a rank to itself, without empty ones."""
    legs: list[Route] = []
    targets = _regions(target_layout, receiver, shape)
    for region, holders in _regions(source_layout, sender, shape):
        receivers = sorted(
            (receiver.devices.index(rank), rank, boxes, wanted)
            for wanted, ranks in targets
            if (boxes := _overlap(region, wanted))
            for rank in ranks
        )
        turn = 0
        for _, rank, boxes, wanted in receivers:
            source = rank if rank in holders else holders[turn % len(holders)]
            turn += rank not in holders
            legs.append(Route(source, rank, boxes, region.spans == wanted.spans))
    return tuple(sorted(legs, key=lambda leg: (leg.target, leg.source)))


def _regions(layout: Layout, mesh: Mesh, shape: tuple[int, ...]) -> list[tuple[LocalRegion, tuple[int, ...]]]:
    """The distinct regions of a tensor, with the ranks that have each, in mesh order."""
    ranks_at: dict[tuple[int, ...], list[int]] = {}
    cutting = [axis.name for axis in mesh.axes if layout.shard_of(axis.name) is not None]
    for rank in mesh.devices:
        at = mesh.coordinates(rank)
        ranks_at.setdefault(tuple(at[name] for name in cutting), []).append(rank)
    return [
        (local_region(layout, shape, mesh.sizes, dict(zip(cutting, place, strict=True))), tuple(ranks))
        for place, ranks in ranks_at.items()
    ]


def _overlap(region: LocalRegion, wanted: LocalRegion) -> tuple[Box, ...]:
    """The boxes of elements that are in both regions; none if there are no elements."""
    dims = [_common(a, b) for a, b in zip(region.spans, wanted.spans, strict=True)]
    return tuple(
        Box(tuple(run[0] for run in runs), tuple(run[1] for run in runs), tuple(run[2] for run in runs))
        for runs in product(*dims)
    )


def _common(mine: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]) -> Spans:
    """The runs of indices that are in both lists. Spans of a shard are in the order of the global dim."""
    spans = []
    i = j = at = other = 0
    while i < len(mine) and j < len(wanted):
        (a, length), (b, width) = mine[i], wanted[j]
        low, high = max(a, b), min(a + length, b + width)
        if low < high:
            spans.append((at + low - a, other + low - b, high - low))
        if a + length <= b + width:
            i, at = i + 1, at + length
        else:
            j, other = j + 1, other + width
    return tuple(spans)

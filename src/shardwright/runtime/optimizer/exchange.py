"""Full tensors for their owners: of several tensors with one layout, each rank of a mesh gets one in full, and back.

An axis that shards what has to be full is an all_to_all, in which each rank sends every owner its shard of the owner's
tensor. Along an axis that replicates, everybody has the same: the owner keeps its own copy, and only the way back is
an all_gather. Here are four tensors a, b, c, d on a mesh of dp=2, which replicates them, and tp=2, which shards them:

    rank (dp, tp)    has shards of       keeps, by dp    owns, after the all_to_all over tp
    0 (0, 0)         a0 b0 c0 d0         a0 b0           a
    1 (0, 1)         a1 b1 c1 d1         a1 b1           b
    2 (1, 0)         a0 b0 c0 d0         c0 d0           c
    3 (1, 1)         a1 b1 c1 d1         c1 d1           d
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.layout import Layout, Shard

from ..collectives import blocks, process_group
from ..faults import flight_recorder
from ..world import Group, Groups


class OwnerExchange:
    """Exchanges tensors of one layout. Dims before `first_dim` may stay sharded: they count matrices, say."""

    def __init__(self, layout: Layout, groups: Groups, first_dim: int = 0) -> None:
        sizes = groups.mesh.sizes
        self._joined: list[tuple[int, Shard, Group]] = []  # in the order in which they are joined
        sharding_axes = set()
        for dim, shards in enumerate(layout.shards):
            for sharding in reversed(shards):  # the minor-most is joined first
                sharding_axes.add(sharding.axis)
                if dim >= first_dim and sizes[sharding.axis] > 1:
                    self._joined.append((dim, sharding, groups[sharding.axis]))
        self._replicating = [
            groups[name] for name in groups.mesh.names if name not in sharding_axes and sizes[name] > 1
        ]
        self._owning = (*self._replicating, *(group for *_, group in self._joined))
        self.owners = math.prod(group.size for group in self._owning)

    @property
    def own(self) -> int:
        """Which of the tensors this rank gets. Ranks that differ in another part of a tensor may share a number."""
        number = 0
        for group in self._owning:
            number = number * group.size + group.index
        return number

    def gather(self, local: Sequence[Tensor]) -> Tensor:
        """The own tensor in full, from this rank's shards of `owners` tensors. All ranks must call it."""
        mine = torch.unflatten(torch.stack(list(local)), 0, [group.size for group in self._owning] or [1])
        for group in self._replicating:
            mine = mine[group.index]
        for dim, sharding, group in self._joined:
            at = dim + mine.ndim - local[0].ndim
            mine = blocks.fill(mine, at, sharding, group.size, group.index).contiguous()
            received = torch.empty_like(mine)
            flight_recorder.enter("all_to_all", group.process_group, "tensors for their owners")
            process_group.all_to_all(received.view(-1), mine.view(-1), group.process_group).wait()
            mine = blocks.unstack(received, at - 1, sharding)
        full: Tensor = mine.reshape(mine.shape[mine.ndim - local[0].ndim :])
        return full

    def shard(self, full: Tensor) -> list[Tensor]:
        """This rank's shards of all `owners` tensors, from the full tensor that each owner passes."""
        mine = full
        for dim, sharding, group in reversed(self._joined):
            at = dim + mine.ndim - full.ndim
            parts = blocks.stack(mine, at, sharding, group.size).contiguous()
            received = torch.empty_like(parts)
            flight_recorder.enter("all_to_all", group.process_group, "shards from owners")
            process_group.all_to_all(received.view(-1), parts.view(-1), group.process_group).wait()
            mine = received.narrow(at + 1, 0, sharding.local(group.size, group.index))
        for group in reversed(self._replicating):
            mine = mine.contiguous()
            every = mine.new_empty((group.size, *mine.shape))
            flight_recorder.enter("all_gather", group.process_group, "shards from owners")
            process_group.all_gather(every.view(-1), mine.view(-1), group.process_group).wait()
            mine = every
        return list(mine.reshape(self.owners, *mine.shape[mine.ndim - full.ndim :]))

"""ZeRO-3 (fully sharded): parameters are sharded too, and gathered layer by layer where they are used."""

from __future__ import annotations

from collections.abc import Iterator

from .storage import Storage, StorageCollective
from .zero2 import reduce_scatter


class Zero3(Storage):
    """A layer's parameters are gathered before its forward and again before its backward."""

    name = "zero3"
    symbol = 3
    title = "ZeRO-3"
    runtime = "shardwright.runtime.parameters.zero3_shards:UnitShards"
    shards_parameter = shards_gradient = shards_state = True

    def collectives(self, summed: tuple[str, ...], trainable: bool, backward: bool) -> Iterator[StorageCollective]:
        yield StorageCollective("forward", "all_gather", self.axes)
        if backward:
            yield StorageCollective("backward", "all_gather", self.axes)
        if backward and trainable:
            yield from reduce_scatter(self.axes, summed)

"""ZeRO-1: each rank keeps a share of the optimizer state, and updates that share of the parameter."""

from __future__ import annotations

from collections.abc import Iterator

from .storage import Storage, StorageCollective


class Zero1(Storage):
    """Gradients are summed as if replicated; updated shares are gathered after the update."""

    name = "zero1"
    symbol = 1
    title = "ZeRO-1"
    runtime = "shardwright.runtime.parameters.buckets:GradientBucket"
    shards_state = True

    def collectives(self, summed: tuple[str, ...], trainable: bool, backward: bool) -> Iterator[StorageCollective]:
        if not backward or not trainable:
            return
        if summed:
            yield StorageCollective("backward", "all_reduce", summed, of_gradient=True)
        yield StorageCollective("update", "all_gather", self.axes)

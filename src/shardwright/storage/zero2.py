"""ZeRO-2: gradients are sharded as the optimizer state is."""

from __future__ import annotations

from collections.abc import Iterator

from .storage import Storage, StorageCollective
from .zero1 import Zero1


class Zero2(Storage):
    """Each rank gets the sum of its share of a gradient; updated shares are gathered after the update."""

    name = "zero2"
    symbol = 2
    title = "ZeRO-2"
    runtime = "shardwright.runtime.parameters.buckets:SplitBucket"
    shards_gradient = shards_state = True

    def collectives(self, summed: tuple[str, ...], trainable: bool, backward: bool) -> Iterator[StorageCollective]:
        if not backward or not trainable:
            return
        yield from reduce_scatter(self.axes, summed)
        yield StorageCollective("update", "all_gather", self.axes)

    def while_accumulating(self) -> Storage:
        """Microbatches add to full gradients, which are reduce-scattered after the last."""
        return Zero1(self.axes)


def reduce_scatter(axes: tuple[str, ...], summed: tuple[str, ...]) -> Iterator[StorageCollective]:
    """A gradient summed over axes, some of which share the result out."""
    yield StorageCollective("backward", "reduce_scatter", axes, of_gradient=True)
    rest = tuple(axis for axis in summed if axis not in axes)
    if rest:
        yield StorageCollective("backward", "all_reduce", rest, of_gradient=True, of_share=True)

"""Replicated storage: every rank has all of what it computes with, and gradients are summed over ranks."""

from __future__ import annotations

from collections.abc import Container, Iterator

from .storage import Storage, StorageCollective


class Replicated(Storage):
    """Plain data parallelism."""

    name = "replicated"
    symbol = 0
    title = "replicated"
    runtime = "shardwright.runtime.parameters.buckets:GradientBucket"

    def collectives(self, summed: tuple[str, ...], trainable: bool, backward: bool) -> Iterator[StorageCollective]:
        if backward and trainable and summed:
            yield StorageCollective("backward", "all_reduce", summed, of_gradient=True)


def restricted(storage: Storage, axes: Container[str]) -> Storage:
    """A storage over some of its axes only: replicated, if none is left."""
    left = tuple(axis for axis in storage.axes if axis in axes)
    return type(storage)(left) if left else Replicated()

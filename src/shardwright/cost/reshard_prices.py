"""The price of a reshard: what a step sends and copies, forward and backward.

There is one. The search for the cheapest path between two layouts (`reshard_search`), which lowering and policies use,
and the tables of the planner (`reshard_tables`) add up these numbers and no others, so that a program communicates no
longer than its plan says.

A step over some axes is priced by the bytes that a device has of the value without shards on these axes:

    all_reduce, all_gather, reduce_scatter    that many
    all_to_all                                what one device holds
    copies                                    what is gathered or scattered is put in order; a share is taken

`ClusterPrices` has seconds. Where no cluster is known, `BytePrices` has bytes on the wire, with a latency in bytes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from ..cluster import Cluster, Collective, Device, Span, collective_time
from ..layout import Mesh
from ..reshard import COLLECTIVES
from .training import backend_traits

Price = tuple[float, float, float, float]
"""Copies forward, copies backward, communication forward, communication backward."""

NEVER = 1e6
"""Seconds of a collective between microbatches, which does not exist."""

SMALL = 16
"""Bytes of a scalar, such as a loss: those of all microbatches are summed when they leave the pipeline."""

LATENCY = 20_000.0
"""What starting a collective costs, in bytes that could have been moved meanwhile."""


class ReshardPrices(ABC):
    """Prices of steps on a mesh with axes of these sizes. What was asked is remembered."""

    def __init__(self, sizes: Mapping[str, int]) -> None:
        self.sizes = dict(sizes)
        self.paths: dict[tuple[Any, ...], Any] = {}  # what `reshard_search` has found
        self._steps: dict[tuple[str, tuple[str, ...], float, bool], Price] = {}

    @abstractmethod
    def waited(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        """A blocking collective over axes, with `bytes` as in `cluster.collective`."""

    @abstractmethod
    def copy(self, bytes: float) -> float:
        """Reading or writing so many bytes."""

    def step(self, kind: str, axes: tuple[str, ...], base: float, gradient: bool) -> Price:
        """The price of a kind of reshard over axes, of a value of `base` bytes without shards on them."""
        key = (kind, axes, base, gradient)
        if key not in self._steps:
            share = base / math.prod(self.sizes[axis] for axis in axes)
            copies = [self.copy(whole * base + part * share) for whole, part in COPIES[kind]]
            sends = [
                self.between(sent, share if sent == "all_to_all" else base, axes, gradient) if sent else 0.0
                for sent in COLLECTIVES[kind]
            ]
            self._steps[key] = (copies[0], copies[1] * gradient, sends[0], sends[1] * gradient)
        return self._steps[key]

    def between(self, kind: Collective, bytes: float, axes: tuple[str, ...], gradient: bool) -> float:
        """A collective of a reshard."""
        return self.waited(kind, bytes, axes)


COPIES = {
    "all_reduce": ((0, 0), (1, 0)),
    "replicate": ((0, 0), (0, 0)),
    "all_reduce_to_r": ((0, 0), (0, 0)),
    "all_gather": ((1, 0), (0, 1)),
    "all_gather_to_r": ((1, 0), (1, 0)),
    "shard": ((0, 1), (1, 0)),
    "shard_from_r": ((0, 1), (0, 1)),
    "reduce_scatter": ((1, 0), (1, 0)),
    "zero_pad": ((0, 1), (0, 1)),
    "all_to_all": ((0, 2), (0, 2)),
    "partial": ((1, 0), (1, 0)),
    "invariant": ((0, 0), (0, 0)),
    "reduce": ((1, 0), (0, 0)),
}
"""What each kind copies forward and backward: so many times all of it, and so many times a share."""


class BytePrices(ReshardPrices):
    """Bytes on the wire, where no cluster is known."""

    def waited(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        parts = math.prod(self.sizes[axis] for axis in axes)
        return (2.0 if kind == "all_reduce" else 1.0) * bytes * (parts - 1) / parts + LATENCY

    def copy(self, bytes: float) -> float:
        return 0.01 * bytes  # memory is faster than any link, and not free


@lru_cache(maxsize=256)
def prices_of(mesh: Mesh, cluster: Cluster | None, placed: Mesh | None = None) -> ReshardPrices:
    """The prices on a mesh: seconds if the cluster is known, else bytes. The same object for the same mesh."""
    return BytePrices(mesh.sizes) if cluster is None else ClusterPrices(mesh, cluster, placed)


class ClusterPrices(ReshardPrices):
    """Seconds on one mesh of one cluster.

    `placed` is the mesh of real devices, with axes of the same names; what is larger in `mesh`, or there only, is in
    time. Nothing can be sent from microbatch to microbatch; what has no gradient is assumed to depend on inputs alone,
    and is computed replicated where that is needed.
    """

    def __init__(self, mesh: Mesh, cluster: Cluster, placed: Mesh | None = None) -> None:
        super().__init__(mesh.sizes)
        self.mesh, self.cluster, self.placed = mesh, cluster, placed or mesh
        self.in_time = frozenset(axis.name for axis in mesh.axes if self.placed.sizes.get(axis.name) != axis.size)
        self.device = slowest_device(cluster, self.placed.devices)
        self.traits = backend_traits(self.device.name, cluster.nodes)
        self._times: dict[tuple[Collective, float, tuple[str, ...]], float] = {}
        self._copies: dict[float, float] = {}
        self._shares: dict[tuple[str, ...], float] = {}
        self._spans: dict[tuple[str, ...], tuple[Span, ...]] = {}

    def spans(self, axes: tuple[str, ...]) -> tuple[Span, ...]:
        """How the groups of ranks along these axes lie on nodes."""
        if axes not in self._spans:
            self._spans[axes] = self.cluster.spans(self.placed, axes)
        return self._spans[axes]

    def collective(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        """Seconds of a collective over axes, with `bytes` as in `cluster.collective`."""
        key = (kind, bytes, tuple(axes))
        if key not in self._times:
            measured = self.cluster.measured
            self._times[key] = max(collective_time(kind, bytes, span, measured) for span in self.spans(key[2]))
        return self._times[key]

    def waited(self, kind: Collective, bytes: float, axes: Sequence[str]) -> float:
        return self.collective(kind, bytes, axes) + self.cluster.meeting

    def memory_share(self, axes: tuple[str, ...]) -> float:
        """The part of the memory's bandwidth that kernels lose to a collective over axes that runs beside them."""
        if axes not in self._shares:
            self._shares[axes] = max(self.cluster.memory_share(span, self.device) for span in self.spans(axes))
        return self._shares[axes]

    def between(self, kind: Collective, bytes: float, axes: tuple[str, ...], gradient: bool) -> float:
        if self.in_time.isdisjoint(axes):
            return self.waited(kind, bytes, axes)
        if not gradient:
            return 0.0
        ranks = tuple(axis for axis in axes if axis in self.placed.names)
        return (self.waited(kind, bytes, ranks) if ranks else 0.0) + (NEVER if bytes > SMALL else 0.0)

    def copy(self, bytes: float) -> float:
        if bytes not in self._copies:
            self._copies[bytes] = self.device.op_time(0.0, bytes, "copy", "")
        return self._copies[bytes]


def slowest_device(cluster: Cluster, ranks: Sequence[int]) -> Device:
    """The one that the others wait for."""
    if len(cluster.devices) == 1:
        return cluster.devices[0]
    return min({cluster.device(rank) for rank in ranks}, key=lambda device: max(peak for _, peak in device.flops))

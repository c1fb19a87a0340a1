"""Devices in nodes, nodes in groups, groups in a cluster; and which links the axes of a mesh cross.

Ranks fill the cluster in order: the devices of the first node, then of the second, group after group. So
with 2 nodes of 4 devices and a mesh dp=2 x tp=4, where tp is between neighbours,

    node 0   0 1 2 3        tp: one node, 4 ranks            the link inside
    node 1   4 5 6 7        dp: two nodes, a rank of each    the network
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np

from ..errors import ClusterError
from ..layout import MOST_DEVICES, Mesh
from .collective import Collective, MeasuredCollective, Span, collective_time
from .device import USUAL_OVERLAP, Device
from .link import Link, slowest

COLLECTIVE_PASSES = 2
"""How often a collective touches memory for a byte that a device receives: it is written, and read to be sent on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """Equal devices in one box: what joins them, and the share that each has of the way out."""

    device: Device
    devices: int
    inside: Link
    network: Link

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ClusterError(f"a node of {self.devices} x {self.device} is none; it has at least one device")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGroup:
    """A number of equal nodes."""

    node: Node
    nodes: int

    def __post_init__(self) -> None:
        if self.nodes < 1:
            raise ClusterError(f"a group of {self.nodes} nodes of {self.node.device} is none; it has at least one node")

    @property
    def size(self) -> int:
        return self.nodes * self.node.devices


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Groups of nodes, maybe of different devices.

    between     what joins the groups, where that is slower than their own networks
    measured    collectives that were timed on it; they take the place of the formula
    overlap     how much of an overlapped collective is hidden by kernels: 1 all, 0 nothing; NaN: as its devices say
    meeting     seconds that ranks lose when they synchronize in a blocking collective, in addition to its own time
    about       where its facts come from, in words
    """

    name: str
    groups: tuple[NodeGroup, ...]
    between: Link | None = None
    measured: tuple[MeasuredCollective, ...] = ()
    overlap: float = math.nan
    meeting: float = 0.0
    about: str = ""
    _starts: tuple[int, ...] = field(init=False, repr=False, compare=False)  # the first rank of each group

    def __post_init__(self) -> None:
        if not self.groups:
            raise ClusterError(f"the cluster {self.name!r} has no group of nodes")
        if math.isnan(self.overlap):
            object.__setattr__(self, "overlap", self.usual_overlap)
        if not 0 <= self.overlap <= 1:
            raise ClusterError(f"the cluster {self.name!r}: overlap is {self.overlap}; it must be in [0, 1]")
        if not 0 <= self.meeting < math.inf:
            raise ClusterError(f"the cluster {self.name!r}: meeting is {self.meeting}; it must be zero or more seconds")
        keys = [(table.kind, table.ranks) for table in self.measured]
        if len(set(keys)) != len(keys):
            raise ClusterError(f"the cluster {self.name!r} has two tables for one collective in one kind of group")
        object.__setattr__(self, "_starts", (0, *accumulate(group.size for group in self.groups)))
        if self.size > MOST_DEVICES:
            raise ClusterError(f"the cluster {self.name!r} has {self.size} devices; there may be {MOST_DEVICES}")

    def __str__(self) -> str:
        return self.name

    @property
    def size(self) -> int:
        """How many devices there are."""
        return self._starts[-1]

    @property
    def nodes(self) -> int:
        return sum(group.nodes for group in self.groups)

    @property
    def memory(self) -> int:
        """Bytes that every device has: those of the smallest."""
        return min(group.node.device.memory for group in self.groups)

    @property
    def usual_overlap(self) -> float:
        """That of the device that hides least, by the processors alone that a collective takes from kernels."""
        return min(group.node.device.overlap for group in self.groups)

    @property
    def devices(self) -> tuple[Device, ...]:
        """The distinct devices."""
        return tuple(dict.fromkeys(group.node.device for group in self.groups))

    def device(self, rank: int) -> Device:
        return self.groups[self._group(rank)].node.device

    def node_of(self, rank: int) -> tuple[int, int]:
        """Which node of which group a rank is on."""
        group = self._group(rank)
        return group, (rank - self._starts[group]) // self.groups[group].node.devices

    def span(self, ranks: Iterable[int]) -> Span:
        """How these ranks lie on nodes, and which links they cross when they talk."""
        counts = Counter(self.node_of(rank) for rank in ranks)
        nodes = {place: self.groups[place[0]].node for place in counts}
        inside = tuple(dict.fromkeys(nodes[place].inside for place, count in counts.items() if count > 1))
        between = tuple(dict.fromkeys(node.network for node in nodes.values())) if len(counts) > 1 else ()
        if self.between is not None and len({group for group, _ in counts}) > 1:
            between = (*between, self.between)
        return Span(
            ranks=tuple(sorted(counts.values(), reverse=True)),
            inside=slowest(inside) if inside else None,
            between=slowest(between) if between else None,
        )

    def spans(self, mesh: Mesh, axes: Iterable[str]) -> tuple[Span, ...]:
        """The different ways in which the groups of ranks along these axes lie on nodes; mostly one."""
        return tuple(dict.fromkeys(self.span(ranks) for ranks in rank_groups(mesh, axes)))

    def collective_time(self, kind: Collective, bytes: float, mesh: Mesh, axes: Iterable[str]) -> float:
        """Seconds until the last group of ranks along these axes is done, all of them talking at once."""
        return max(collective_time(kind, bytes, span, self.measured) for span in self.spans(mesh, axes))

    def memory_share(self, span: Span, device: Device) -> float:
        """The part of a device's memory bandwidth that a collective takes from kernels while it runs.

        What was measured or set as overlap has it already, and of a device without an overlap of its own nothing is
        known.
        """
        if self.overlap != self.usual_overlap or device.overlap == USUAL_OVERLAP or span.size == 1:
            return 0.0
        reached = device.bandwidth * device.fraction("copy", device.bandwidth)
        return min(1.0, COLLECTIVE_PASSES * span.ring / reached)

    def _group(self, rank: int) -> int:
        if not 0 <= rank < self.size:
            raise ClusterError(f"there is no rank {rank} in {self.name!r}, which has {self.size} devices")
        return bisect_right(self._starts, rank) - 1


def rank_groups(mesh: Mesh, axes: Iterable[str]) -> list[list[int]]:
    """The ranks that differ only in these axes. `Mesh.groups` in one pass, for meshes of thousands."""
    chosen = {mesh.axis(name).name for name in axes}
    inside = [at for at, axis in enumerate(mesh.axes) if axis.name in chosen]
    size = math.prod(mesh.axes[at].size for at in inside)
    grid = np.array(mesh.devices).reshape([axis.size for axis in mesh.axes])
    groups: list[list[int]] = np.moveaxis(grid, inside, range(-len(inside), 0)).reshape(-1, size).tolist()
    return groups

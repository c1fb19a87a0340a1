"""How long a collective takes, from the links that its group of ranks crosses.

A `Span` says how a group of ranks lies on nodes:

    |x x x x|           inside of a node        n = 4, one node
    |x . . .|x . . .|   across nodes            n = 2, two nodes, one rank of each
    |x x x x|x x x x|   both                    n = 8, two nodes, k = 4 ranks of each

Bytes are counted on one rank, at full size: what an all_reduce, a broadcast or a send carries, what an all_gather
ends with, what a reduce_scatter starts with, all that one rank holds before an all_to_all. With S bytes, n
ranks on N nodes, and at least k ranks on each node, a ring passes each link with

    all_gather, reduce_scatter    S (n - 1) / n
    all_reduce                    twice that: it is a reduce_scatter and an all_gather
    broadcast, send               S

A ring enters and leaves each node once, over the adapters of all k ranks together; its chunks are on both
levels at the same time. So the bandwidth that counts is min(inside, k * between). An all_to_all sends
S (k - 1) / n to ranks of its own node and then S (n - k) / n to others. Latencies add up: a hop for each of
the n - 1 steps of a ring, of which N - 1 are between nodes; up and down a tree of log2 k hops inside and
log2 N between for an all_reduce (down only for a broadcast). These are the algorithms that NCCL chooses for
large and for small messages.

Where a cluster was calibrated, `Measured` times of a kind and a span take the place of the formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from ..errors import ClusterError
from .curve import Curve
from .link import Link

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "send"]
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """How a group of ranks lies on nodes, and the links it crosses.

    ranks      how many of the group are on each node that has any, the most first
    inside     the link among those that share a node; None if none do
    between    the link from node to node; None if there is one node
    """

    ranks: tuple[int, ...]
    inside: Link | None = None
    between: Link | None = None

    def __post_init__(self) -> None:
        if not self.ranks or min(self.ranks) < 1 or list(self.ranks) != sorted(self.ranks, reverse=True):
            raise ClusterError(f"a span has a rank or more on each node, the most first, not {self.ranks}")
        if (self.inside is not None) != (self.ranks[0] > 1):
            raise ClusterError(f"a span of {self.ranks} ranks has a link inside exactly if some share a node")
        if (self.between is not None) != (len(self.ranks) > 1):
            raise ClusterError(f"a span of {self.ranks} ranks has a link between exactly if there are several nodes")

    def __str__(self) -> str:
        if len(set(self.ranks)) > 1:
            return " + ".join(map(str, self.ranks))
        return f"{self.nodes} x {self.ranks[0]}"

    @property
    def size(self) -> int:
        return sum(self.ranks)

    @property
    def nodes(self) -> int:
        return len(self.ranks)

    @property
    def links(self) -> tuple[Link, ...]:
        """The links that the group crosses, the inner one first."""
        return tuple(link for link in (self.inside, self.between) if link is not None)

    @property
    def ring(self) -> float:
        """Bytes per second with which a ring over the group turns."""
        levels = []
        if self.inside is not None:
            levels.append(self.inside.among(self.ranks[0]))
        if self.between is not None:
            levels.append(self.between.among(2) * self.ranks[-1])
        return min(levels)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCollective:
    """The seconds that a collective was measured to take, by bytes, in groups that lie on nodes in one way."""

    kind: Collective
    ranks: tuple[int, ...]
    seconds: Curve

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVES:
            raise ClusterError(f"{self.kind!r} is no collective; there are {', '.join(COLLECTIVES)}")
        if not self.ranks or min(self.ranks) < 1 or list(self.ranks) != sorted(self.ranks, reverse=True):
            raise ClusterError(f"measured {self.kind}: ranks are those on each node, the most first, not {self.ranks}")

    def time(self, bytes: float) -> float:
        """Below the smallest message the time is the latency, above the largest it grows with the bytes."""
        return self.seconds.at(bytes) * max(1.0, bytes / self.seconds.last)


def collective_time(kind: Collective, bytes: float, span: Span, measured: tuple[MeasuredCollective, ...] = ()) -> float:
    """Seconds that a collective takes in a group that lies so on nodes; see the top of the file for `bytes`."""
    if kind not in COLLECTIVES:
        raise ClusterError(f"{kind!r} is no collective; there are {', '.join(COLLECTIVES)}")
    if span.size == 1 or bytes <= 0:
        return 0.0
    for table in measured:
        if table.kind == kind and table.ranks == span.ranks:
            return table.time(bytes)
    return _latency(kind, span) + _transfer(kind, bytes, span)


def _latency(kind: Collective, span: Span) -> float:
    inside = span.inside.latency if span.inside is not None else 0.0
    between = span.between.latency if span.between is not None else 0.0
    if kind == "send":  # the longest way that a pair of the group may be apart
        return between if span.between is not None else inside
    if kind in ("all_reduce", "broadcast"):
        down = math.ceil(math.log2(span.ranks[0])) * inside + math.ceil(math.log2(span.nodes)) * between
        return 2 * down if kind == "all_reduce" else down
    if kind == "all_to_all":
        return (span.ranks[0] - 1) * inside + (span.size - span.ranks[-1]) * between
    return (span.size - span.nodes) * inside + (span.nodes - 1) * between


def _transfer(kind: Collective, bytes: float, span: Span) -> float:
    size = span.size
    if kind == "send":
        link = span.between or span.inside
        assert link is not None
        return bytes / link.among(2)
    if kind == "all_to_all":
        inside = bytes * (span.ranks[0] - 1) / size / span.inside.among(span.ranks[0]) if span.inside else 0.0
        between = bytes * (size - span.ranks[-1]) / size / span.between.among(size) if span.between else 0.0
        return inside + between
    return wire_bytes(kind, bytes, size) / span.ring


def wire_bytes(kind: Collective, bytes: float, ranks: int) -> float:
    """What a rank sends in a collective of so many bytes, in a group of so many ranks."""
    if ranks == 1:
        return 0.0
    return bytes * {"all_reduce": 2.0 * (ranks - 1) / ranks, "broadcast": 1.0, "send": 1.0}.get(
        kind, (ranks - 1) / ranks
    )

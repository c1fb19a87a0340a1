"""What joins devices: inside of a node, or nodes with each other."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ..errors import ClusterError


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """How one device communicates to the others.

    bandwidth    peak bytes per second **of one device, in one direction**, while all the others communicate too.
                 (Vendors like to say both directions: NVLink 3 of "600 GB/s" is 300 here.)
    latency      seconds for one hop, however small the message
    efficiency   the fraction of the bandwidth that collectives reach
    pair         peak to one other device, where that is less: in a node without a switch a device has an
                 own wire to each peer, and two devices alone can't use the others. None: all of it.
    """

    name: str
    bandwidth: float
    latency: float
    efficiency: float = 1.0
    pair: float | None = None

    def __post_init__(self) -> None:
        if not self.name:
            raise ClusterError("a link needs a name")
        if not 0 < self.bandwidth < math.inf:
            raise ClusterError(f"the link {self.name!r}: bandwidth is {self.bandwidth}; it must be a positive number")
        if not 0 <= self.latency < math.inf:
            raise ClusterError(f"the link {self.name!r}: latency is {self.latency}; it must be zero or more seconds")
        if not 0 < self.efficiency <= 1:
            raise ClusterError(f"the link {self.name!r}: efficiency is {self.efficiency}; it must be in (0, 1]")
        if self.pair is not None and not 0 < self.pair <= self.bandwidth:
            raise ClusterError(
                f"the link {self.name!r}: pair is {self.pair}; it must be positive and at most the bandwidth"
            )

    def __str__(self) -> str:
        return self.name

    def among(self, devices: int) -> float:
        """Bytes per second that a device really sends while so many devices, with itself, communicate."""
        peak = self.bandwidth if self.pair is None else min(self.bandwidth, self.pair * max(devices - 1, 1))
        return peak * self.efficiency


def slowest(links: tuple[Link, ...]) -> Link:
    """One link that is in everything as slow as the slowest of these."""
    latency = max(link.latency for link in links)
    bandwidth = min(link.bandwidth * link.efficiency for link in links)
    pair = min(link.among(2) for link in links)
    for link in links:
        if (link.latency, link.bandwidth * link.efficiency, link.among(2)) == (latency, bandwidth, pair):
            return link
    name = "+".join(sorted({link.name for link in links}))
    return Link(name=name, bandwidth=bandwidth, latency=latency, pair=pair if pair < bandwidth else None)

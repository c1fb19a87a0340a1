"""Clusters as data: devices, links, nodes; from a name, a file or a measurement. What time things take on them."""

from .cluster import Cluster, Group, Node
from .collective import COLLECTIVES, Collective, Measured, Span, collective_time
from .curve import Curve
from .device import KINDS, Device, Efficiency, Kind
from .file import find, load, save
from .link import Link
from .name import parse

__all__ = [
    "COLLECTIVES", "KINDS", "Cluster", "Collective", "Curve", "Device", "Efficiency", "Group", "Kind", "Link",
    "Measured", "Node", "Span", "collective_time", "find", "load", "parse", "save",
]  # fmt: skip

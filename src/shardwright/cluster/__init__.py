"""Clusters as data: devices, links, nodes; from a name, a file or a measurement. What time things take on them."""

from .cluster import Cluster, Node, NodeGroup
from .collective import COLLECTIVES, Collective, MeasuredCollective, Span, collective_time
from .curve import Curve
from .device import KINDS, Device, Efficiency, Kind
from .file import find, load, save
from .link import Link
from .name import parse

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "Cluster",
    "Collective",
    "Curve",
    "Device",
    "Efficiency",
    "Kind",
    "Link",
    "MeasuredCollective",
    "Node",
    "NodeGroup",
    "Span",
    "collective_time",
    "find",
    "load",
    "parse",
    "save",
]  # fmt: skip

"""Clusters as data: devices, links and nodes, and how long ops and collectives take on them.

Read `cluster.py`, `device.py` and `link.py` (the types), `curve.py` (efficiencies over sizes), `collective.py` (the
time of a collective), `catalogue.py` (known devices), `name.py`, `file.py` and `schema.py` (clusters from a name or a
YAML file), `quantity.py` ("80GiB").
"""

from .cluster import Cluster, Node, NodeGroup
from .collective import COLLECTIVES, Collective, MeasuredCollective, Span, collective_time
from .curve import Curve
from .device import KINDS, USUAL_OVERLAP, AttentionPrice, Device, Efficiency, Kind
from .file import dump, find, load, loads, save
from .link import Link
from .name import parse

__all__ = [
    "COLLECTIVES",
    "KINDS",
    "USUAL_OVERLAP",
    "AttentionPrice",
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
    "dump",
    "find",
    "load",
    "loads",
    "parse",
    "save",
]  # fmt: skip

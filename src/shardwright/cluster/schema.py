"""Reads a cluster from the plain data of a file, key by key, and keeps a list of everything that is wrong with it.

What can't be read is noted and replaced by something harmless, so that the rest is looked at too; whoever calls
must raise if there are faults.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, fields
from typing import Any, TypeVar

from ..errors import ClusterError
from ..formats import show
from ..layout import MOST_DEVICES
from . import catalogue, quantity
from .catalogue import DEVICES, LINKS, USUAL, unknown
from .cluster import Cluster, Node, NodeGroup
from .collective import COLLECTIVES, MeasuredCollective
from .curve import Curve
from .device import ITEM, KINDS, USUAL_OVERLAP, AttentionPrice, Device, Efficiency
from .link import Link
from .quantity import Measure

VERSION = 1
T = TypeVar("T")

CLUSTER_KEYS = ("version", "name", "about", "devices", "links", "groups", "between", "overlap", "meeting",
                "measured")  # fmt: skip
DEVICE_KEYS = ("flops", "memory", "bandwidth", "efficiency")
OPTIONAL_DEVICE_KEYS = ("edge", "attention", "overlap")
ATTENTION_KEYS = tuple(field.name for field in fields(AttentionPrice))
LINK_KEYS: dict[str, Measure] = {
    "bandwidth": "bytes/s", "latency": "seconds", "efficiency": "number", "pair": "bytes/s",
}  # fmt: skip
GROUP_KEYS = ("nodes", "devices", "device", "inside", "network")
TABLE_KEYS = ("kind", "ranks", "seconds")

# What stands for what could not be read.
A_DEVICE, A_LINK, A_CURVE = DEVICES["cpu"], LINKS["loopback"], Curve(((1.0, 1.0),))
A_NODE = Node(device=A_DEVICE, devices=1, inside=A_LINK, network=A_LINK)
A_GROUP = NodeGroup(node=A_NODE, nodes=1)
A_CLUSTER = Cluster(name="cpu", groups=(A_GROUP,))


def largest_node(groups: Iterable[NodeGroup]) -> int:
    """What joins groups is an adapter in each node too: its devices share it, at worst those of the largest."""
    return max((group.node.devices for group in groups), default=1)


class ClusterReader:
    """Reads one file. `faults` says what is wrong, each with the key where it is."""

    def __init__(self) -> None:
        self.faults: list[str] = []
        self.devices: dict[str, Device] = {}
        self.links: dict[str, Link] = {}

    def cluster(self, data: Any, name: str) -> Cluster:
        if not self.has_keys(data, "the file", CLUSTER_KEYS, ("version", "groups")):
            return A_CLUSTER
        if data["version"] != VERSION:
            self.fault("version", f"{data['version']!r} is not known; this is version {VERSION}")
        for key, item in self.entries(data.get("links", {}), "links"):
            self.links[key] = self.link(item, f"links.{key}", key)
        for key, item in self.entries(data.get("devices", {}), "devices"):
            self.devices[key] = self.device(item, f"devices.{key}", key)
        rows = self.rows(data["groups"], "groups")
        groups = [self.group(item, f"groups[{place}]") for place, item in enumerate(rows)]
        between = self.network(data["between"], largest_node(groups), "between") if "between" in data else None
        rows = self.rows(data["measured"], "measured") if "measured" in data else []
        measured = [self.table(item, f"measured[{place}]") for place, item in enumerate(rows)]
        overlap = self.number(data["overlap"], "number", "overlap") if "overlap" in data else math.nan
        meeting = self.number(data.get("meeting", 0.0), "seconds", "meeting")
        name, about = self.text(data.get("name", name), "name"), self.text(data.get("about", ""), "about")
        return self.build("the file", 0, A_CLUSTER, lambda: Cluster(
            name=name, about=about, groups=tuple(groups), between=between, overlap=overlap, meeting=meeting,
            measured=tuple(measured),
        ))  # fmt: skip

    def device(self, data: Any, at: str, name: str) -> Device:
        before = len(self.faults)
        if not self.has_keys(data, at, ("like", *DEVICE_KEYS, *OPTIONAL_DEVICE_KEYS)):
            return A_DEVICE
        like = self.named(data["like"], f"{at}.like", {}, catalogue.device, A_DEVICE) if "like" in data else None
        missing = [key for key in DEVICE_KEYS if key not in data]
        if like is None and missing:
            self.fault(at, f"{', '.join(missing)} missing; say it, or take it from another device with `like`")
            return A_DEVICE
        base = like or A_DEVICE
        flops = tuple(
            (key, self.number(value, "flops", f"{at}.flops.{key}"))
            for key, value in self.entries(data.get("flops", {}), f"{at}.flops")
        )
        efficiency = self.efficiency(data.get("efficiency", {}), f"{at}.efficiency")
        kinds = {item.kind for item in efficiency}
        inherited = () if like is None else tuple(item for item in like.efficiency if item.kind not in kinds)
        memory = self.number(data.get("memory", base.memory), "bytes", f"{at}.memory")
        bandwidth = self.number(data.get("bandwidth", base.bandwidth), "bytes/s", f"{at}.bandwidth")
        edge = self.number(data.get("edge", like.edge if like else 0.0), "number", f"{at}.edge")
        kernel = self.attention(data.get("attention", {}), f"{at}.attention", like.attention if like else None)
        overlap = self.number(data.get("overlap", like.overlap if like else USUAL_OVERLAP), "number", f"{at}.overlap")
        return self.build(at, before, A_DEVICE, lambda: Device(
            name=name, flops=flops if "flops" in data else base.flops, memory=int(memory), bandwidth=bandwidth,
            efficiency=(*efficiency, *inherited), edge=edge, attention=kernel, overlap=overlap,
        ))  # fmt: skip

    def attention(self, data: Any, at: str, like: AttentionPrice | None) -> AttentionPrice:
        """How a device's attention departs from its efficiency; what is not said is as in `like`."""
        before, base = len(self.faults), like or AttentionPrice()
        if not self.has_keys(data, at, ATTENTION_KEYS):
            return base
        numbers = {key: self.number(value, "number", f"{at}.{key}") for key, value in data.items()}
        return self.build(at, before, base, lambda: AttentionPrice(**{**asdict(base), **numbers}))

    def efficiency(self, data: Any, at: str) -> tuple[Efficiency, ...]:
        """For each kind of op a curve, or curves by dtype."""
        if not self.has_keys(data, at, KINDS):
            return ()
        curves = []
        for kind, entry in data.items():
            by_dtype = entry if isinstance(entry, dict) and any(key in ITEM for key in entry) else {"": entry}
            for dtype, item in by_dtype.items():
                curve = self.curve(item, f"{at}.{kind}.{dtype}".rstrip("."))
                curves.append(Efficiency(kind=kind, dtype=str(dtype), curve=curve))
        return tuple(curves)

    def link(self, data: Any, at: str, name: str) -> Link:
        before = len(self.faults)
        if not self.has_keys(data, at, LINK_KEYS, ("bandwidth", "latency")):
            return A_LINK
        numbers = {key: self.number(value, LINK_KEYS[key], f"{at}.{key}") for key, value in data.items()}
        return self.build(at, before, A_LINK, lambda: Link(name=name, **numbers))

    def group(self, data: Any, at: str) -> NodeGroup:
        before = len(self.faults)
        if not self.has_keys(data, at, GROUP_KEYS, ("device", "devices")):
            return A_GROUP
        nodes, devices = self.count(data.get("nodes", 1), f"{at}.nodes"), self.count(data["devices"], f"{at}.devices")
        device = self.named(data["device"], f"{at}.device", self.devices, catalogue.device, A_DEVICE)
        missing = [key for key in ("inside", "network") if key not in data]
        if missing and device.name in self.devices and len(self.faults) == before:
            self.fault(at, f"{' and '.join(missing)} missing; {device.name} is an own device, so there is no usual one")
        if len(self.faults) > before:
            return A_GROUP
        link = data["inside"] if "inside" in data else USUAL[device.name].inside
        inside = self.named(link, f"{at}.inside", self.links, catalogue.inside, A_LINK)
        if "network" in data:
            network = self.network(data["network"], devices, f"{at}.network")
        else:
            network = catalogue.usual_network(device.name, devices)
        return NodeGroup(node=Node(device=device, devices=devices, inside=inside, network=network), nodes=nodes)

    def network(self, name: Any, devices: int, at: str) -> Link:
        return self.named(name, at, self.links, lambda text: catalogue.network(text, devices), A_LINK)

    def table(self, data: Any, at: str) -> MeasuredCollective:
        before = len(self.faults)
        instead = MeasuredCollective(kind="send", ranks=(2,), seconds=A_CURVE)
        if not self.has_keys(data, at, TABLE_KEYS, TABLE_KEYS):
            return instead
        if data["kind"] not in COLLECTIVES:
            self.fault(f"{at}.kind", str(unknown("collective", str(data["kind"]), COLLECTIVES)))
        ranks = tuple(self.count(item, f"{at}.ranks") for item in self.rows(data["ranks"], f"{at}.ranks"))
        curve = self.curve(data["seconds"], f"{at}.seconds", "seconds")
        return self.build(
            at, before, instead, lambda: MeasuredCollective(kind=data["kind"], ranks=ranks, seconds=curve)
        )

    def curve(self, data: Any, at: str, measure: Measure = "number") -> Curve:
        """Values by size, or one value for all sizes."""
        before = len(self.faults)
        pairs = data.items() if isinstance(data, dict) else [(1, data)]
        points = [
            (self.number(size, "bytes", f"{at}, size {size}"), self.number(value, measure, f"{at}, size {size}"))
            for size, value in pairs
        ]
        return self.build(at, before, A_CURVE, lambda: Curve(tuple(sorted(points))))

    # -- what all of these are made of

    def fault(self, at: str, message: str) -> None:
        self.faults.append(f"{at}: {message}")

    def build(self, at: str, before: int, instead: T, make: Callable[[], T]) -> T:
        """What `make` makes, if there are no new faults and it does not refuse."""
        if len(self.faults) > before:
            return instead
        try:
            return make()
        except ClusterError as error:
            self.fault(at, str(error))
            return instead

    def named(self, name: Any, at: str, own: Mapping[str, T], find: Callable[[str], T], instead: T) -> T:
        """What has a name in this file, or else in the catalogue."""
        if str(name) in own:
            return own[str(name)]
        try:
            return find(str(name))
        except ClusterError as error:
            self.fault(at, f"{error}{', and in this file ' if own else ''}{', '.join(own)}")
            return instead

    def has_keys(self, data: Any, at: str, keys: Iterable[str], needed: Iterable[str] = ()) -> bool:
        if not isinstance(data, dict):
            self.fault(at, f"{show(data)} is not a mapping of keys to values")
            return False
        wrong = [key for key in data if key not in keys]
        missing = [key for key in needed if key not in data]
        for key in wrong:
            self.fault(at, str(unknown("key", str(key), keys)))
        if missing:
            self.fault(at, f"{', '.join(missing)} missing")
        return not wrong and not missing

    def entries(self, data: Any, at: str) -> list[tuple[str, Any]]:
        if not isinstance(data, dict):
            self.fault(at, f"{show(data)} is not a mapping of names to facts")
            return []
        return [(str(key), value) for key, value in data.items()]

    def rows(self, data: Any, at: str) -> list[Any]:
        if not isinstance(data, list) or not data:
            self.fault(at, f"{show(data)} is not a list with at least one entry")
            return []
        return data

    def number(self, value: Any, measure: Measure, at: str) -> float:
        try:
            return quantity.read(value, measure)
        except ValueError as error:
            self.fault(at, str(error))
            return 1.0

    def count(self, value: Any, at: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MOST_DEVICES:
            self.fault(at, f"{show(value)} is not a number from 1 to {MOST_DEVICES}")
            return 1
        return value

    def text(self, value: Any, at: str) -> str:
        if not isinstance(value, str):
            self.fault(at, f"{show(value)} is not text")
        return str(value)

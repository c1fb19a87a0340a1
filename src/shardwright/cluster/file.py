"""Clusters in YAML files.

    version: 1
    name: lab
    devices:                          # only what is not in the catalogue, or is other than there
      A100-slow:
        like: A100-80GB               # what is not given here is as there
        flops: {bfloat16: 250 TFLOPS, float32: 15 TFLOPS}
        memory: 79.1 GiB
        bandwidth: 1.8 TB/s
        efficiency: {matmul: 0.7, copy: {65536: 0.1, 16777216: 0.8}}    # a fraction, or fractions by size
        attention: {causal: 0.9, backward: 0.87}    # how fused attention departs from its efficiency
        overlap: 0.8                  # the part of its processors that kernels keep beside a collective
    links:
      slow: {bandwidth: 20 GB/s, latency: 8 us, efficiency: 0.9, pair: 10 GB/s}
    groups:
      - {nodes: 2, devices: 8, device: A100-slow, inside: slow, network: 4xinfiniband-100}
    between: ethernet-100             # from group to group, if slower than their own networks; may be left out
    overlap: 0.3                      # how much of a collective kernels hide, instead of what follows from the devices
    meeting: 2 us                     # what ranks lose when they meet in a collective that they wait for
    measured:                         # written by `shardwright calibrate`
      - {kind: all_reduce, ranks: [8], seconds: {1024: 20e-6, 1048576: 45e-6}}

Everything is checked, and all faults are reported together with the keys that they are at.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from ..errors import ClusterError, raise_all
from ..formats import parse_yaml, read_yaml
from . import catalogue, quantity
from .catalogue import DEVICES, LINKS
from .cluster import Cluster
from .curve import Curve
from .device import USUAL_OVERLAP, AttentionPrice, Device
from .link import Link
from .name import parse
from .schema import VERSION, ClusterReader, largest_node

HEADER = "# A cluster for shardwright; docs/clusters.md says what the keys mean.\n"


def find(text: str | Path) -> Cluster:
    """A cluster by its name, or by the path of its file (which ends in .yaml or .yml)."""
    if isinstance(text, Path) or text.endswith((".yaml", ".yml")):
        return load(text)
    return parse(text)


def load(path: str | Path) -> Cluster:
    """The cluster in a YAML file."""
    return _read(read_yaml(path, ClusterError), path)


def loads(text: str, path: str | Path) -> Cluster:
    """The cluster in the text of a YAML file; `path` is for messages."""
    return _read(parse_yaml(text.encode(), path, ClusterError), path)


def _read(data: Any, path: str | Path) -> Cluster:
    reader = ClusterReader()
    cluster = reader.cluster(data, Path(path).stem)
    raise_all(ClusterError, f"{path} does not describe a cluster:", reader.faults)
    return cluster


def save(cluster: Cluster, path: str | Path) -> None:
    """Write a cluster so that `load` gives it back."""
    Path(path).write_text(dump(cluster), encoding="utf-8")


def dump(cluster: Cluster) -> str:
    """The text of a cluster's file."""
    return HEADER + str(yaml.safe_dump(to_data(cluster), sort_keys=False, default_flow_style=None, width=110))


def to_data(cluster: Cluster) -> dict[str, Any]:
    """A cluster as plain data, in the order in which a person would write it."""
    devices = [device for device in cluster.devices if DEVICES.get(device.name) != device]
    links = _own_links(cluster)
    data: dict[str, Any] = {"version": VERSION, "name": cluster.name}
    if cluster.about:
        data["about"] = cluster.about
    if devices:
        data["devices"] = {device.name: _device(device) for device in devices}
        if len(data["devices"]) < len(devices):
            raise ClusterError(f"{cluster.name}: two different devices have one name; rename one")
    if links:
        data["links"] = {name: _link(link) for name, link in links.items()}
    data["groups"] = [
        {
            "nodes": group.nodes, "devices": group.node.devices, "device": group.node.device.name,
            "inside": group.node.inside.name, "network": group.node.network.name,
        }
        for group in cluster.groups
    ]  # fmt: skip
    if cluster.between is not None:
        data["between"] = cluster.between.name
    if cluster.overlap != cluster.usual_overlap:
        data["overlap"] = cluster.overlap
    if cluster.meeting:
        data["meeting"] = quantity.write(cluster.meeting, "seconds")
    if cluster.measured:
        data["measured"] = [
            {"kind": table.kind, "ranks": list(table.ranks), "seconds": _curve(table.seconds)}
            for table in cluster.measured
        ]
    return data


def _own_links(cluster: Cluster) -> dict[str, Link]:
    """The links that the catalogue does not have under their names, or has otherwise."""
    used = [(group.node.inside, LINKS.get(group.node.inside.name)) for group in cluster.groups]
    used += [(group.node.network, _network(group.node.network.name, group.node.devices)) for group in cluster.groups]
    if cluster.between is not None:
        used.append((cluster.between, _network(cluster.between.name, largest_node(cluster.groups))))
    own = {link.name: link for link, known in used if link != known}
    for link, _ in used:
        if own.get(link.name, link) != link:
            raise ClusterError(f"{cluster.name}: two different links have the name {link.name}; rename one")
    return own


def _network(name: str, devices: int) -> Link | None:
    return catalogue.network(name, devices) if catalogue.is_network(name) else None


def _device(device: Device) -> dict[str, Any]:
    efficiency: dict[str, Any] = {}
    for item in device.efficiency:
        if item.dtype:
            efficiency.setdefault(item.kind, {})[item.dtype] = _curve(item.curve)
        else:
            efficiency[item.kind] = _curve(item.curve)
    data: dict[str, Any] = {
        "flops": {dtype: quantity.write(peak, "flops") for dtype, peak in device.flops},
        "memory": quantity.write(device.memory, "bytes"),
        "bandwidth": quantity.write(device.bandwidth, "bytes/s"),
        "efficiency": efficiency,
    }
    if device.edge:
        data["edge"] = quantity.write(device.edge, "number")
    usual = asdict(AttentionPrice())
    kernel = {key: value for key, value in asdict(device.attention).items() if value != usual[key]}
    if kernel:
        data["attention"] = kernel
    if device.overlap != USUAL_OVERLAP:
        data["overlap"] = device.overlap
    return data


def _link(link: Link) -> dict[str, Any]:
    data = {"bandwidth": quantity.write(link.bandwidth, "bytes/s"), "latency": quantity.write(link.latency, "seconds")}
    if link.efficiency != 1:
        data["efficiency"] = link.efficiency
    if link.pair is not None:
        data["pair"] = quantity.write(link.pair, "bytes/s")
    return data


def _curve(curve: Curve) -> dict[Any, Any]:
    return {quantity.write(size, "number"): quantity.write(value, "number") for size, value in curve.points}

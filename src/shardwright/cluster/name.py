"""The names that people write for clusters.

    cluster = group { "+" group }                 8xH100+8xA100-80GB       different groups of nodes
    group   = [nodes "x"] [devices "x"] device    4x8xH100, 8xA100-80GB, H100, cpu
              | "cpu:" devices                    cpu:4
              { "@" link }                        2x8xA100-40GB@ethernet-100

One number is devices: they are in one node, or, where there are more than the usual node has, in several of the
usual size. A link after "@" takes the place of the usual one: inside (nvlink-3, pcie-4, ...) or between
nodes (ethernet-100 is one adapter a node, 8xinfiniband-200 are eight).
"""

from __future__ import annotations

from dataclasses import replace

from ..errors import ClusterError
from .catalogue import USUAL, device, inside, is_network, network, usual_network
from .cluster import Cluster, Node, NodeGroup

EXAMPLES = "8xA100-80GB, 4x8xH100, 2x8xA100-40GB@ethernet-100, 8xH100+8xA100-80GB, cpu:4"


def parse(text: str) -> Cluster:
    """The cluster that a name stands for."""
    name = text.strip()
    if not name:
        raise ClusterError(f"an empty name is no cluster; write a name such as {EXAMPLES}")
    return Cluster(name=name, groups=tuple(_group(part.strip(), name) for part in name.split("+")))


def _group(text: str, name: str) -> NodeGroup:
    counted, *links = text.split("@")
    if counted.lower().startswith("cpu:") and counted[4:].isdigit():
        counted = f"{counted[4:]}xcpu"
    numbers, kind = _numbers(counted, name)
    known = device(kind)
    usual = USUAL[known.name]
    if len(numbers) == 2:
        nodes, devices = numbers
    else:
        nodes, devices = _nodes(numbers[0] if numbers else 1, usual.devices, name)
    node = Node(
        device=known,
        devices=devices,
        inside=inside(usual.inside),
        network=usual_network(known.name, devices),
    )
    for link in links:
        between = is_network(link)
        node = replace(node, network=network(link, devices)) if between else replace(node, inside=inside(link))
    return NodeGroup(node=node, nodes=nodes)


def _numbers(text: str, name: str) -> tuple[list[int], str]:
    """The counts in front of a device, and the device. Devices may have an x in their names: MI300X."""
    numbers: list[int] = []
    rest = text
    while True:
        head, x, tail = rest.partition("x")
        if not x or not head.isdigit():
            break
        numbers.append(int(head))
        rest = tail
    if len(numbers) > 2 or 0 in numbers or not rest:
        raise ClusterError(f"{name!r} is no name of a cluster; write nodes x devices x device, such as {EXAMPLES}")
    return numbers, rest


def _nodes(devices: int, usual: int, name: str) -> tuple[int, int]:
    if not usual or devices <= usual:
        return 1, devices
    if devices % usual:
        raise ClusterError(
            f"{name!r}: {devices} devices do not fill nodes of {usual}; say it in two numbers, nodes x devices"
        )
    return devices // usual, usual

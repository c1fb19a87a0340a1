"""What a plan file says of a plan's cost beside the numbers of `price`: what each axis does, how parameters are stored.

Ops of equal layers are listed once, with a star and a count.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from ..cluster import Cluster
from ..cost import flops, is_matmul
from ..ir import Graph
from ..ir.graph import ITEM_SIZE
from ..layout import Layout, Mesh
from ..rules import Analysis, Choices
from ..storage import Storage
from .folding import star

MOST_EXPENSIVE = 5
"""How many ops and reshards a plan file names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisUse:
    """What an axis of a mesh is used for.

    links     that it crosses, the slowest last
    nodes     that a group along it lies on
    batch     the fraction of the matmul FLOPs that it splits on the batch,
    weights   on a dim of a parameter,
    other     and on anything else, such as the sequence
    """

    axis: str
    size: int
    links: tuple[str, ...]
    nodes: int
    batch: float
    weights: float
    other: float

    def as_json(self) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "size": self.size,
            "links": list(self.links),
            "nodes": self.nodes,
            "batch": round(self.batch, 4),
            "weights": round(self.weights, 4),
            "other": round(self.other, 4),
        }


def axis_uses(
    analysis: Analysis, mesh: Mesh, cluster: Cluster, choices: Mapping[str, Mapping[str, str]]
) -> tuple[AxisUse, ...]:
    """What the axes of a mesh are used for under these choices."""
    kinds = atom_kinds(analysis)
    products = [op for op in analysis.graph.ops if is_matmul(analysis.signatures[op.name])]
    total = sum(flops(analysis.signatures[op.name]) for op in products) or 1.0
    uses = []
    for axis in mesh.axes:
        work = {"batch": 0.0, "weights": 0.0, "other": 0.0}
        for op in products:
            signature, picked = analysis.signatures[op.name], choices.get(op.name, {}).get(axis.name)
            role = signature.picked(picked)
            if role is not None:
                work[kinds.get(role.atom, "other")] += flops(signature) / total
        spans = cluster.spans(mesh, (axis.name,))
        links = dict.fromkeys(link.name for span in spans for link in span.links)
        nodes = max(len(span.ranks) for span in spans)
        uses.append(AxisUse(axis=axis.name, size=axis.size, links=tuple(links), nodes=nodes, **work))
    return tuple(uses)


def ring_notes(analysis: Analysis, mesh: Mesh, choices: Choices, cluster: Cluster) -> Iterator[str]:
    """Which rings of attention go from node to node."""
    for axis in mesh.axes:
        nodes = max(len(span.ranks) for span in cluster.spans(mesh, (axis.name,)))
        picked = [(signature, signature.picked(choices.get(op, {}).get(axis.name)))
                  for op, signature in analysis.signatures.items()]  # fmt: skip
        count = sum(role is not None and signature.is_split_by("ring", role) for signature, role in picked)
        if count and nodes > 1:
            yield (
                f"{count} attention ops send keys and values around {axis.name}={axis.size}, which spans {nodes} "
                "nodes; what the links between them don't hide is in the prediction"
            )


def atom_kinds(analysis: Analysis) -> dict[int, str]:
    """Of each atom that is the batch's or a parameter's: "batch" or "weights"."""
    return dict.fromkeys(analysis.owned, "weights") | dict.fromkeys(analysis.batch, "batch")


class ParameterHomes(Protocol):
    """Tables, which know how parameters lie and are stored in a state of the search."""

    @property
    def graph(self) -> Graph: ...
    @property
    def homes(self) -> Collection[str]: ...
    def home(self, key: str, states: Sequence[int]) -> tuple[Layout, Storage]: ...


def stored_bytes(
    solutions: Iterable[tuple[ParameterHomes, Sequence[int], Collection[str] | None]],
) -> dict[str, float]:
    """Bytes of full parameters by how they are stored, most first: {"ZeRO-3 over dp": ..., "replicated": ...}.

    Each solution comes with the keys that count, None for all. A parameter of several counts once.
    """
    bytes_by_storage: dict[str, float] = {}
    known: set[str] = set()
    for tables, states, keys in solutions:
        for parameter in tables.graph.parameters:
            if parameter.key in known or (keys is not None and parameter.key not in keys):
                continue
            known.add(parameter.key)
            placed = parameter.key in tables.homes  # else nothing reads it
            how = _storage_text(*tables.home(parameter.key, states)) if placed else "replicated"
            value = tables.graph.values[parameter.value]
            bytes_by_storage[how] = bytes_by_storage.get(how, 0.0) + value.elements * ITEM_SIZE.get(value.dtype, 4)
    return dict(sorted(bytes_by_storage.items(), key=lambda item: -item[1]))


def _storage_text(layout: Layout, storage: Storage) -> str:
    """How a parameter lies on ranks: "sharded over tp, ZeRO-3 over dp"."""
    axes = sorted(shard.axis for shards in layout.shards for shard in shards)
    parts = [f"sharded over {', '.join(axes)}"] if axes else []
    parts += [f"{storage.title} over {', '.join(storage.axes)}"] if storage.axes else []
    return ", ".join(parts) or "replicated"


class StoredPart(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def seconds(self) -> float: ...
    @property
    def sends(self) -> str: ...


def fold_parts(parts: Iterable[StoredPart], most: int = MOST_EXPENSIVE) -> list[dict[str, Any]]:
    """The most expensive parts, those of equal layers as one."""
    seconds_by_name: dict[tuple[str, str], list[float]] = {}
    for part in parts:
        seconds_by_name.setdefault((star_all(part.name), part.sends), []).append(part.seconds)
    most_expensive = sorted(seconds_by_name.items(), key=lambda item: -sum(item[1]))[:most]
    return [
        {
            "name": name,
            "count": len(seconds),
            "seconds": float(f"{sum(seconds):.4g}"),
            **({"sends": sends} if sends else {}),
        }
        for (name, sends), seconds in most_expensive
        if sum(seconds) > 0
    ]


def star_all(name: str) -> str:
    """Both ends of a reshard with stars for layer numbers."""
    return " -> ".join(star(end) for end in name.split(" -> "))

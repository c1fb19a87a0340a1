"""Data-parallel replicas: which axes of a mesh split the batch, and the layout of a value split like the batch."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..layout import Layout, Mesh, replicated
from ..storage import SHARDED_KINDS
from .signature import Analysis

REPLICAS = ("dp", *(kind.name for kind in SHARDED_KINDS), "ep")
"""Policies that split the batch."""


def replica_axes(mesh: Mesh) -> tuple[str, ...]:
    """The axes that split the batch: those named dp (dp2, ...), ep, or by a ZeRO level."""
    return tuple(axis.name for axis in mesh.axes if is_replica(axis.name))


def replicas(mesh: Mesh) -> int:
    """Over how many groups a mesh splits the batch."""
    return math.prod(mesh.sizes[name] for name in replica_axes(mesh))


def is_replica(name: str) -> bool:
    """Whether an axis of this name splits the batch."""
    return name in REPLICAS or name.startswith("dp")


def batch_layout(analysis: Analysis, mesh: Mesh, axes: Sequence[str], name: str) -> Layout:
    """The layout in which each group of ranks along these axes has its own samples of a value."""
    layout = replicated(len(analysis.graph.values[name].shape))
    splits: list[tuple[int, int]] = []
    for axis in mesh.axes:
        if axis.name not in axes or not layout.shards:
            continue
        for atom in analysis.batch:
            shard = analysis.atoms.shard(analysis.dims[name][0], atom, axis, splits)
            if shard is not None:
                layout = layout.with_shard(0, shard)
                splits.append((atom, axis.size))
    return layout

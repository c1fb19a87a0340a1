"""Ops that draw random numbers, and values that depend on no chance and on nothing else that changes."""

from __future__ import annotations

from ..ir import Graph, Op
from .registry import KEYED


def is_random(op: Op) -> bool:
    """Random ops other than dropout have no masks by position: all ranks draw the same, whole."""
    return op.draws and op.target not in KEYED


def constants_of(graph: Graph) -> frozenset[str]:
    """Values that depend on no input, no parameter and no changing buffer, and on no chance."""
    fixed = {buffer.value for buffer in graph.buffers if buffer.update is None}
    for op in graph.ops:
        if not op.draws and not op.target.startswith("call.") and all(name in fixed for name in op.inputs):
            fixed.update(op.outputs)
    return frozenset(fixed)

"""Ops that draw random numbers, and values that depend on no chance and on nothing else that changes."""

from __future__ import annotations

from ..ir import Graph, Op

DROPOUTS = ("aten.dropout.default", "aten.native_dropout.default")
RANDOM = ("dropout", "rand", "bernoulli", "normal", "multinomial", "poisson", "exponential", "uniform")


def is_random(op: Op) -> bool:
    """Whether an op draws random numbers."""
    return is_random_target(op.target)


def is_random_target(target: str) -> bool:
    return any(word in target for word in RANDOM)


def is_drawn_whole(op: Op) -> bool:
    """Random ops other than dropout have no masks by position: all ranks draw the same, whole."""
    return is_random(op) and "dropout" not in op.target


def constants_of(graph: Graph) -> frozenset[str]:
    """Values that depend on no input, no parameter and no changing buffer, and on no chance."""
    fixed = {buffer.value for buffer in graph.buffers if buffer.update is None}
    for op in graph.ops:
        if not is_random(op) and not op.target.startswith("call.") and all(name in fixed for name in op.inputs):
            fixed.update(op.outputs)
    return frozenset(fixed)

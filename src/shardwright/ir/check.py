"""Whether a graph keeps its own rules. Runs after capture and between passes."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import GraphError, raise_all
from .graph import Argument, Graph, Slot


def check(graph: Graph) -> Graph:
    """Return the graph, or raise one error that lists everything that is wrong with it."""
    raise_all(GraphError, f"the graph of {graph.name} ({graph.entry}) is malformed:", list(_faults(graph)))
    return graph


def _faults(graph: Graph) -> Iterator[str]:
    known: set[str] = set()
    for kind, name in [
        *(("input", item.value) for item in graph.inputs),
        *(("parameter", item.value) for item in graph.parameters),
        *(("buffer", item.value) for item in graph.buffers),
    ]:
        if name not in graph.values:
            yield f"{kind} {name} has no shape"
        if name in known:
            yield f"{kind} {name} is defined twice"
        known.add(name)
    names: set[str] = set()
    for op in graph.ops:
        if op.name in names:
            yield f"two ops have the name {op.name}"
        names.add(op.name)
        for name in op.inputs:
            if name not in known:
                yield f"{op} reads {name}, which nothing before it makes"
        for slot in _slots([value for _, value in op.arguments]):
            if slot.index >= len(op.inputs):
                yield f"{op} has an argument for its input {slot.index}, but only {len(op.inputs)} inputs"
        for name in op.outputs:
            if name in known:
                yield f"{op} makes {name}, which exists already"
            if name not in graph.values:
                yield f"{op} makes {name}, which has no shape"
            known.add(name)
    for name in graph.sinks():
        if name not in known:
            yield f"the graph returns {name}, which nothing makes"
    for name, value in graph.values.items():
        if value.gradient and not value.floating:
            yield f"{value} has a gradient but is not floating"
        if name not in known:
            yield f"{value} is made by nothing"


def _slots(arguments: Argument) -> Iterator[Slot]:
    for argument in arguments:
        if isinstance(argument, Slot):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _slots(argument)

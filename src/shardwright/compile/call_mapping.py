"""The way into a program and out of it: from a call to inputs, and from outputs to what is returned."""

from __future__ import annotations

from typing import Any

from ..capture import CapturedGraph
from ..ir import Graph
from ..runtime.model.inputs import Mode
from .batched import signature_of


def ways_of(captured: CapturedGraph, mode: Mode) -> dict[str, Any]:
    """Of an entry, all that capture knows."""
    leaves = {leaf.value: leaf.path for leaf in captured.input_leaves if leaf.value is not None}
    graph = captured.graph
    places = {value.value: at for at, value in enumerate(graph.inputs)}
    return {
        "flatten": captured.flatten,
        "unflatten": captured.unflatten,
        "literals": tuple(output.value is None for output in graph.outputs),
        "dtypes": tuple((leaves[value.value], graph.values[value.value].dtype) for value in graph.inputs),
        "shared": shared_outputs(graph),
        "padding": tuple((places[name], number) for name, number in captured.padding),
        "signature": signature_of(captured, mode),
    }


def shared_outputs(graph: Graph) -> tuple[str, ...]:
    """For each output its path, if another output is computed of it and has a gradient, or is the same; else ""."""
    returned = [output.value for output in graph.outputs if output.value is not None]
    leading = {value for value in returned if graph.values[value].floating}
    read: set[str] = set()
    for op in reversed(graph.ops):
        if not op.no_grad and not op.target.startswith("aten.detach") and leading.intersection(op.outputs):
            floats = {value for value in op.inputs if graph.values[value].floating}
            leading |= floats
            read |= floats
    return tuple(
        output.path or "of the model" if output.value in read or returned.count(output.value) > 1 else ""  # type: ignore[arg-type]
        for output in graph.outputs
    )

"""Branches and turns of loops as methods. They run whole, so their sizes are plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..ir import Graph, Op
from ..ops.random import DROPOUTS
from .calls import call_text
from .names import Names
from .sizes import SizeNames


def branch_method(graph: Graph, sizes: SizeNames, context: Callable[[Op], str]) -> Iterator[str]:
    """The lines of a method that runs a graph."""
    outputs = [output.value for output in graph.outputs if output.value is not None]
    names = Names(graph.ops, outputs, sizes.taken)
    words = names.bind_all(item.value for item in graph.inputs)
    shapes = ", ".join(f"{word} {_shape(graph, item.value)}" for word, item in zip(words, graph.inputs, strict=True))
    yield f"    def {graph.name}(self{''.join(', ' + word for word in words)}):  # {shapes}"
    last = ""
    for at, op in enumerate(graph.ops):
        op = keyed(graph, op)
        inputs = {index: names.words[name] for index, name in enumerate(op.inputs)}
        text = call_text(op, inputs, sizes, {})
        lines: list[str] = []
        for name in op.outputs:
            lines.append(names.bind(name, at, lines) if name in names.last else "_")
        wanted = context(op)
        if wanted and wanted != last:
            yield f"        with {wanted}:"
        last = wanted
        source = f"  {op.source}" if op.source else ""
        yield f"{'    ' if wanted else ''}        {', '.join(lines)} = {text}  # {_shape(graph, op.outputs[0])}{source}"
    yield f"        return {', '.join(names.words[name] for name in outputs)}"


def _shape(graph: Graph, value: str) -> str:
    return str(list(graph.values[value].shape))


def keyed(graph: Graph, op: Op) -> Op:
    """Masks are drawn by the name of the op, as everywhere."""
    if op.target in DROPOUTS:
        return replace(op, target="runtime.dropout").with_arguments(op_key=f"{graph.name}: {op.name}", splits=())
    if op.argument("dropout_p", 0.0):
        return replace(op, target="runtime.attention").with_arguments(op_key=f"{graph.name}: {op.name}", splits=())
    return op

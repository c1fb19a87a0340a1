"""A graph as text, one op per line: what you print to look for a fault."""

from __future__ import annotations

from collections.abc import Iterator

from .graph import Argument, Graph, Op, Slot


def show(graph: Graph) -> str:
    return "\n".join(_lines(graph))


def _lines(graph: Graph) -> Iterator[str]:
    yield f"graph {graph.name} ({graph.entry}), fingerprint {graph.fingerprint}"
    for item in graph.inputs:
        yield f"  input      {graph.values[item.value]}  from {item.path}"
    for parameter in graph.parameters:
        frozen = "" if parameter.trainable else "  frozen"
        change = f"  becomes {parameter.update}" if parameter.update else ""
        yield f"  parameter  {graph.values[parameter.value]}  {', '.join(parameter.keys)}{frozen}{change}"
    for buffer in graph.buffers:
        change = f"  becomes {buffer.update}" if buffer.update else ""
        yield f"  buffer     {graph.values[buffer.value]}  {buffer.key}{change}"
    for op in graph.ops:
        outs = ", ".join(str(graph.values[name]) for name in op.outputs)
        at = f"  # {op.name}" + (f"  {op.source}" if op.source else "")
        yield f"  {outs} = {op.target}({show_arguments(op)}){at}"
    for branch in graph.branches.values():
        yield from (f"  {line}" for line in _lines(branch))
    for output in graph.outputs:
        result = output.value if output.value is not None else repr(output.literal)
        yield f"  output     {result}  as {output.path}{', a number' if output.number else ''}"


def show_arguments(op: Op) -> str:
    """The arguments of an op by name, with the names of values in them."""
    return ", ".join(f"{name}={_argument(op, value)}" for name, value in op.arguments)


def _argument(op: Op, value: Argument) -> str:
    if isinstance(value, Slot):
        return op.inputs[value.index]
    if isinstance(value, tuple):
        return f"[{', '.join(_argument(op, item) for item in value)}]"
    return str(value) if not isinstance(value, str) or value.isidentifier() else repr(value)

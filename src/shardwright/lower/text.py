"""A program as text, one op per line with the layouts of its results: what you print to look for a fault."""

from __future__ import annotations

from collections.abc import Iterator

from ..ir import Op
from ..ir.text import show_arguments
from .program import LoweredProgram


def show(program: LoweredProgram) -> str:
    return "\n".join(_lines(program))


def _lines(program: LoweredProgram) -> Iterator[str]:
    yield f"program {program.graph.name} ({program.graph.entry}) on {program.mesh}"
    for parameter in program.parameters:
        yield f"  parameter  {parameter.value} {program.layouts[parameter.value]}  {', '.join(parameter.keys)}"
    for kind, ops in (("constant  ", program.constants), ("prologue  ", program.prologue), ("", program.body)):
        for op in ops:
            yield f"  {kind}{_results(program, op)} = {op.target}({_arguments(op)})  # {op.name}"
    for output, value in zip(program.graph.outputs, program.outputs, strict=True):
        yield f"  output     {value if value is not None else repr(output.literal)}  as {output.path}"
    for key, value in program.updates:
        yield f"  buffer     {key} becomes {value}"


def _results(program: LoweredProgram, op: Op) -> str:
    return ", ".join(f"{name} {program.layouts[name]}" for name in op.outputs)


def _arguments(op: Op) -> str:
    """Reshards have their value as input only, not among their arguments."""
    arguments = show_arguments(op)
    return ", ".join([*op.inputs, arguments]) if op.target.startswith("comm.") else arguments

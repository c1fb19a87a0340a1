"""Whether a program keeps its own rules. Runs after every pass."""

from __future__ import annotations

from collections.abc import Iterator

from ..errors import LayoutError, LoweringError, raise_all
from .program import LoweredProgram


def check(program: LoweredProgram) -> LoweredProgram:
    """Return the program, or raise one error that lists everything that is wrong with it."""
    raise_all(LoweringError, f"the program of {program.graph.name} is malformed:", list(_faults(program)))
    return program


def _faults(program: LoweredProgram) -> Iterator[str]:
    graph = program.graph
    known = {item.value for item in graph.inputs} | {b.value for b in graph.buffers}
    known |= {holding.value for holding in program.parameters} | {early.value for early in program.early}
    for op in program.ops:
        for name in op.inputs:
            if name not in known:
                yield f"{op} reads {name}, which nothing before it makes"
        for name in op.outputs:
            if name in known:
                yield f"{op} makes {name}, which exists already"
            if name not in program.layouts or name not in program.values:
                yield f"{op} makes {name}, which has no layout"
            known.add(name)
    for name in program.needed():
        if name not in known:
            yield f"the program returns {name}, which nothing makes"
    first = dict.fromkeys(program.mesh.names, 0)
    for name in known & set(program.layouts):
        try:
            program.layouts[name].local_shape(program.values[name].shape, program.mesh.sizes, first)
        except LayoutError as error:
            yield f"{program.values[name]}: {error}"

"""Which layers are methods of the generated code: their names go when they return, others live in `forward`.

A layer is a method if a neighbour in its list does the same (`emit/layers.py` makes them a loop), if all of it is
recomputed, or if it does what such a layer does. Here layers are compared by their ops and what these make; where
that says less than the emitter looks at, a value is held longer in the simulation than in the program, or as long.
"""

from __future__ import annotations

from itertools import groupby
from typing import NamedTuple

from ..ir import Op
from ..ir.paths import layer_of, numbered_layer
from ..lower import LoweredProgram


class LayerRun(NamedTuple):
    """Ops of one layer that follow each other, and what they do."""

    layer: str
    ops: list[Op]
    key: object

    def follows(self, other: LayerRun) -> bool:
        """Whether it is the layer after another one, and does the same."""
        if not (self.layer and other.layer and self.key == other.key):
            return False
        (mine, number), (path, before) = numbered_layer(self.layer) or ("", 0), numbered_layer(other.layer) or ("", 0)
        return mine == path and number == before + 1

    @property
    def recomputed(self) -> bool:
        return self.ops[0].region is not None and len({op.region for op in self.ops}) == 1


def method_scopes(program: LoweredProgram) -> dict[str, str]:
    """By op: the layer whose method it is in, "" for `forward`."""
    runs = [
        LayerRun(layer, ops := list(group), _key(program, layer, ops) if layer else None)
        for layer, group in groupby(program.body, key=lambda op: layer_of(op.module_path))
    ]
    methods = {
        run.key
        for before, run, after in zip((None, *runs), runs, (*runs[1:], None), strict=False)
        if run.layer
        and (run.recomputed or (before and run.follows(before)) or (after is not None and after.follows(run)))
    }
    return {op.name: run.layer if run.key in methods else "" for run in runs for op in run.ops}


def _key(program: LoweredProgram, layer: str, ops: list[Op]) -> object:
    values, layouts = program.values, program.layouts
    return tuple(
        (op.name.removeprefix(layer), op.target, *((values[name].shape, layouts[name]) for name in op.outputs))
        for op in ops
    )

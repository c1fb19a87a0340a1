"""The program of a rank: local ops with reshards between them, and how parameters are held.

All ranks of a mesh run the same program and differ only by their coordinates. Shapes in
`values` stay global; what a rank really has follows from `layouts`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ..ir import Graph, Input, Op, Value
from ..layout import MB, Layout, Mesh, Reduction, chunk_bounds
from ..rules import Analysis
from ..storage import ParameterSpec


@dataclass(frozen=True, slots=True)
class SizeFactor:
    """One factor of a size: an atom, or a plain number, with the axes that shard it, major to minor."""

    size: int
    atom: int | None = None
    axes: tuple[str, ...] = ()

    def local(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
        size = self.size
        for axis in self.axes:
            size = chunk_bounds(size, sizes[axis], at[axis])[1]
        return size


@dataclass(frozen=True, slots=True)
class Size:
    """A local size as a sum of products, so that it can be printed with names ("3 * h * E")."""

    sections: tuple[tuple[SizeFactor, ...], ...]

    def local(self, sizes: Mapping[str, int], at: Mapping[str, int]) -> int:
        return sum(math.prod(factor.local(sizes, at) for factor in section) for section in self.sections)

    def times(self, number: int) -> Size:
        if number == 1:
            return self
        return Size(tuple((SizeFactor(number), *section) for section in self.sections))

    def global_size(self) -> Size:
        return Size(tuple(tuple(SizeFactor(f.size, f.atom) for f in section) for section in self.sections))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrologueValue:
    """A value that all microbatches need and no parameter goes into: `source` of each, reduced over time and `axes`."""

    value: str
    source: str
    how: Reduction = "sum"
    axes: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class LoweredProgram:
    """The program for one entry on one mesh."""

    graph: Graph
    analysis: Analysis
    mesh: Mesh
    plan_name: str
    plan_policy: str
    values: Mapping[str, Value]
    layouts: Mapping[str, Layout]
    parameters: tuple[ParameterSpec, ...]
    constants: tuple[Op, ...] = ()  # run once, whole, when the program is loaded
    body: tuple[Op, ...] = ()
    outputs: tuple[str | None, ...] = ()  # the value for each output of the graph, None for a literal
    updates: tuple[tuple[str, str], ...] = ()  # (buffer key, value)
    mode: str = "global"
    choices: Mapping[str, Any] | None = None
    title: str = ""  # what it is of a pipeline,
    header: tuple[str, ...] = ()  # and what else the head of its file says
    stepped: bool = False  # run by a schedule, several times in a training step
    puts_off: bool = False  # backward is in two steps, and weights' gradients are for the second
    received: frozenset[str] = frozenset()  # the inputs that come from other stages
    prologue: tuple[Op, ...] = ()  # run for every microbatch before the first forward
    early: tuple[PrologueValue, ...] = ()  # what the prologue makes for all of them
    chunked: Mapping[str, int] = field(default_factory=dict)  # losses whose logits are made in so many chunks of rows
    known_sizes: dict[Any, Size] = field(default_factory=dict, repr=False, compare=False)

    def with_(self, **changes: Any) -> LoweredProgram:
        return replace(self, **changes)

    @property
    def ops(self) -> tuple[Op, ...]:
        return self.constants + self.prologue + self.body

    @property
    def devices(self) -> int:
        """How many run it."""
        return math.prod(axis.size for axis in self.mesh.axes if axis.name != MB)

    @property
    def prologue_inputs(self) -> tuple[Input, ...]:
        """The inputs that the prologue reads."""
        read = {name for op in self.prologue for name in op.inputs} | {early.source for early in self.early}
        return tuple(item for item in self.graph.inputs if item.value in read)

    def users(self) -> dict[str, list[Op]]:
        users: dict[str, list[Op]] = {}
        for op in self.ops:
            for name in op.inputs:
                users.setdefault(name, []).append(op)
        return users

    def sizes_of(self, value: str) -> tuple[Size, ...]:
        """The local size of every dim of a value, in atoms."""
        dims, layout = self.analysis.dims[graph_value(value)], self.layouts[value]
        return tuple(self._size_of(dim, shards) for dim, shards in zip(dims, layout.shards, strict=True))

    def _size_of(self, dim: tuple[int, ...], shards: tuple[Any, ...]) -> Size:
        if (dim, shards) not in self.known_sizes:
            self.known_sizes[dim, shards] = _size(self, dim, shards)
        return self.known_sizes[dim, shards]

    def varies_in_time(self, axis: str) -> bool:
        """Whether an axis is that of the microbatches, which differ anyway."""
        return axis == MB

    def needed(self) -> set[str]:
        """The values that leave the program."""
        return {name for name in self.outputs if name is not None} | {name for _, name in self.updates}


def graph_value(value: str) -> str:
    """The graph's name for a program value: reshards add "@n" to it."""
    return value.split("@", 1)[0]


def _size(program: LoweredProgram, dim: tuple[int, ...], shards: tuple[Any, ...]) -> Size:
    atoms, mesh = program.analysis.atoms, program.mesh
    split: list[tuple[int, int]] = []
    axes: dict[int, tuple[str, ...]] = {}
    for shard in shards:
        axis = mesh.axis(shard.axis)
        for atom in atoms.splittable(dim):
            if shard in (atoms.shard(dim, atom, axis, split), atoms.shard(dim, atom, axis, split, striped=True)):
                split.append((atom, axis.size))
                axes[atom] = (*axes.get(atom, ()), axis.name)
                break
        else:
            total = atoms.product(dim)
            return Size(((SizeFactor(total, None, tuple(shard.axis for shard in shards)),),))
    return Size(
        tuple(
            tuple(SizeFactor(atoms.size[a], a, axes.get(a, ())) for a in section) for section in flat(atoms, dim, axes)
        )
    )


def flat(atoms: Any, dim: tuple[int, ...], shard: Mapping[int, Any]) -> list[tuple[int, ...]]:
    """The sections of a dim, opened only as far as a shard reaches into them."""
    sections: list[tuple[int, ...]] = [()]
    for atom in atoms.expand(dim):
        inner = atoms.sections(atom)
        if inner is None or atom in shard or not _reaches(atoms, inner, shard):
            sections = [(*section, atom) for section in sections]
        else:
            opened = [part for section in inner for part in flat(atoms, section, shard)]
            sections = [(*section, *part) for section in sections for part in opened]
    return sections


def _reaches(atoms: Any, sections: tuple[tuple[int, ...], ...], shard: Mapping[int, Any]) -> bool:
    return any(atom in shard for section in sections for part in flat(atoms, section, shard) for atom in part)

"""Which splits of an op recombine: candidates from dependences, each tested on shards.

A split shards some inputs into the same number of units and finds those units in every output, by
concatenation, or in none, by sum, max or min. Testing all sets of dims would be far too many, so the
dependences are measured first: half the units of an input's dim are changed; an output that does not
change does not depend on them. A dim of an output can be split into units that depend on the same
units of some inputs; those inputs are sharded, the others replicated. Candidates are run on shards,
forward, and compared with the global op.

    places     a dim, and the block of it that is split: (outer, units, inner), as in layout.py
    touched    which elements of the outputs change with the first or the second half of a place
    a split    a place or None for each input; a place for each output, or the reduction that joins it
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, islice, product

import torch
from torch import Tensor

from ..layout import (
    Axis,
    Block,
    Layout,
    Mesh,
    Partial,
    Reduction,
    Shard,
    chunk_bounds,
    make_layout,
    make_shard,
    replicated,
)
from .check import AXIS, Run, apart, difference, local_value, mesh_of, parts_of
from .samples import NotProbed, Sample, numbers, with_numbers

Place = tuple[int, Block]
"""A dim, and the block of it that is split."""

TRIES = 24
"""Maximum sets of arguments, or of inputs, that are tried for one split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedSplit:
    """One way to split the op at the sizes of the sample. `shares` are the arguments that shrink with it."""

    units: int
    inputs: tuple[Place | None, ...]
    outputs: tuple[Place | Reduction, ...]
    added: frozenset[int] = frozenset()  # inputs that are added only once in a sum
    shares: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """Result of the search: splits, and groups of inputs in which the op is linear."""

    splits: tuple[ProbedSplit, ...]
    linear: tuple[tuple[int, ...], ...]


def search(sample: Sample, run: Run) -> ProbeResult:
    """All splits of the sample's op that recombine, forward."""
    with torch.no_grad():
        return _Probe(sample, run).result()


class _Probe:
    def __init__(self, sample: Sample, run: Run) -> None:
        self.op, self.call, self.run = sample.call.op, sample.call, run
        self.inputs, self.other = sample.draw(1), sample.draw(2)
        before = [x.clone() for x in self.inputs]
        self.outputs = list(run(self.op, self.inputs))
        again = run(self.op, before)
        if any(difference(x, y) for x, y in zip(self.inputs, before, strict=True)):
            raise NotProbed("it changes its inputs")
        if any(_differ(x, y) for x, y in zip(self.outputs, again, strict=True)):
            raise NotProbed("it returns another result each time")
        self.shapes = [tuple(x.shape) for x in self.inputs]
        self.results = [tuple(x.shape) for x in self.outputs]
        self.arguments = dict(numbers(self.op))
        self.splits: list[ProbedSplit] = []
        self.tried: set[object] = set()
        self.blocks = False  # whether parts of dims are searched yet
        self.touched: dict[tuple[int, Place], list[list[Tensor]]] = {}
        self.masks: dict[Block, Tensor] = {}

    def result(self) -> ProbeResult:
        """Full dims first, then the remaining blocks, large ones first."""
        sizes = {size for shape in (*self.shapes, *self.results) for size in shape if size > 1}
        top = max(sizes, default=1)
        for self.blocks in (False, True):
            waiting = sorted(sizes | {number for number in self.arguments.values() if 1 < number <= top})
            while waiting:
                units = waiting.pop()
                if self._joined(units) or self._reduced(units):  # the rest of its dims may be split too
                    last = self.splits[-1]
                    rests = {_rest(place) for place in (*last.inputs, *last.outputs)} - sizes - {1}
                    sizes |= rests
                    waiting = sorted({*waiting, *rests, units})
        for at, shape in enumerate(self.results):
            for dim, size in enumerate(shape):
                self._stretched(at, dim, size)
        return ProbeResult(tuple(self.splits), self._linear())

    # Outputs that have the units: by concatenation.

    def _joined(self, units: int) -> bool:
        """Find one split into `units` units."""
        for at, shape in enumerate(self.results):
            for target in self._places(shape, units, len(self.shapes) + at):
                if not self._is_free(len(self.shapes) + at, target):
                    continue
                inputs = tuple(self._local(k, at, target, units) for k in range(len(self.shapes)))
                if not any(inputs):
                    continue
                outputs = [
                    target if o == at else self._follows(inputs, o, target, units) for o in range(len(self.results))
                ]
                known = tuple(place for place in outputs if place is not None)
                if len(known) == len(outputs) and self._try(units, inputs, known):
                    return True
        return False

    def _local(self, k: int, out: int, target: Place, units: int) -> Place | None:
        """Where input `k` may be split so that the target's units read only their own units of it."""
        places = [
            place for place in self._places(self.shapes[k], units, k)
            if self._is_free(k, place) and self._depends_alike(k, place, out, target)
        ]  # fmt: skip
        return target if target in places else places[0] if places else None

    def _follows(self, inputs: Sequence[Place | None], out: int, like: Place, units: int) -> Place | None:
        places = [
            place for place in self._places(self.results[out], units, len(self.shapes) + out)
            if self._is_free(len(self.shapes) + out, place)
            and all(own is None or self._depends_alike(k, own, out, place) for k, own in enumerate(inputs))
        ]  # fmt: skip
        return like if like in places else places[0] if places else None

    def _depends_alike(self, k: int, place: Place, out: int, target: Place) -> bool:
        if (k, place) not in self.touched:
            self.touched[k, place] = self._touch(k, place)
        dim, block = target
        first = self._mask(block)
        along = [self.touched[k, place][half][out] for half in (0, 1)]
        rest = [at for at in range(along[0].ndim) if at != dim]
        upper, lower = (x.any(rest) if rest else x for x in along)
        return not bool((upper & ~first).any()) and not bool((lower & first).any())

    def _touch(self, k: int, place: Place) -> list[list[Tensor]]:
        """For each half of a place which elements of every output change with it."""
        dim, block = place
        x = self.inputs[k]
        first = self._mask(block).view([-1 if at == dim else 1 for at in range(x.ndim)])
        touched: list[list[Tensor]] = []
        for half in (first, ~first):
            changed = [torch.where(half, _another(x, self.other[k]), x) if at == k else tensor.clone()
                       for at, tensor in enumerate(self.inputs)]  # fmt: skip
            try:
                results = self.run(self.op, changed)
            except Exception:  # it rejects the values: assume that everything depends on them
                results = ()
            if [tuple(y.shape) for y in results] != self.results:
                touched.append([torch.ones_like(y, dtype=torch.bool) for y in self.outputs])
            else:
                touched.append([_changed(y, z) for y, z in zip(self.outputs, results, strict=True)])
        return touched

    def _mask(self, block: Block) -> Tensor:
        """The elements of a dim in the first of two shards."""
        if block not in self.masks:
            mask = torch.zeros(block.elements, dtype=torch.bool)
            for start, length in Shard(axis=AXIS, blocks=(block,)).spans(2, 0):
                mask[start : start + length] = True
            self.masks[block] = mask
        return self.masks[block]

    # Outputs that lack the units: by sum, max or min.

    def _reduced(self, units: int) -> bool:
        """Find one split of inputs whose dims of this size are in no split yet, all of them together or some."""
        open_ = [
            [place for place in self._places(shape, units, k) if self._is_free(k, place)]
            for k, shape in enumerate(self.shapes)
        ]
        if not any(place[1].outer == place[1].inner == 1 for places in open_ for place in places):
            return False
        sets = sorted(
            product(*([None, *places] for places in open_)), key=lambda option: sum(x is None for x in option)
        )
        kinds: tuple[Reduction, ...] = ("sum", "max", "min")
        if any(value.gradient for value in self.call.outputs):
            kinds = ("sum",)
        for inputs in islice(sets, TRIES * 2):
            for kind in kinds if any(inputs) else ():
                outputs = (kind,) * len(self.results)
                if any(self._try(units, inputs, outputs, added) for added in self._biases(inputs, kind)):
                    return True
        return False

    def _biases(self, inputs: Sequence[Place | None], kind: Reduction) -> Iterator[frozenset[int]]:
        yield frozenset()
        unsplit = [k for k, place in enumerate(inputs) if place is None and self.inputs[k].is_floating_point()]
        if kind == "sum":
            yield from (
                frozenset(some) for count in range(1, len(unsplit) + 1) for some in combinations(unsplit, count)
            )

    def _stretched(self, out: int, dim: int, size: int) -> None:
        """A dim that comes from an argument, not from an input."""
        place = (dim, Block(1, size, 1))
        alike = all(shape == self.results[out] for shape in self.results)
        if size > 1 and size in self.arguments.values() and alike and self._is_free(len(self.shapes) + out, place):
            self._try(size, (None,) * len(self.shapes), (place,) * len(self.results))

    # Places.

    def _places(self, shape: Sequence[int], units: int, tensor: int) -> Iterator[Place]:
        """Every block of `units` units in a tensor, plain dims first."""
        yield from ((dim, Block(1, units, 1)) for dim, size in enumerate(shape) if size == units)
        for dim, size in enumerate(shape):
            if self.blocks and size % units == 0 and size > units and not self._is_covered(tensor, dim, size):
                rest = size // units
                outers = (outer for outer in range(1, rest + 1) if rest % outer == 0)
                yield from ((dim, Block(outer, units, rest // outer)) for outer in outers)

    def _blocks(self, tensor: int, dim: int) -> list[Block]:
        """The blocks of a dim that splits use already; outputs are numbered after the inputs."""
        every = [(*split.inputs, *split.outputs)[tensor] for split in self.splits]
        return [place[1] for place in every if isinstance(place, tuple) and place[0] == dim]

    def _is_covered(self, tensor: int, dim: int, size: int) -> bool:
        for block in self._blocks(tensor, dim):
            size //= block.size
        return size == 1

    def _is_free(self, tensor: int, place: Place) -> bool:
        dim, block = place
        return all(_nested(block, other) or _nested(other, block) for other in self._blocks(tensor, dim))

    # Trying.

    def _try(
        self,
        units: int,
        inputs: tuple[Place | None, ...],
        outputs: tuple[Place | Reduction, ...],
        added: frozenset[int] = frozenset(),
    ) -> bool:
        """Keep the split if it recombines with some set of arguments scaled down."""
        if (inputs, outputs, added) in self.tried:
            return False
        self.tried.add((inputs, outputs, added))
        for shares in islice(self._shares(units, inputs, outputs), TRIES):
            split = ProbedSplit(units=units, inputs=inputs, outputs=outputs, added=added, shares=shares)
            if self._holds(split, parts_of(units)[-1]):
                self.splits.append(split)
                return True
        return False

    def _shares(
        self, units: int, inputs: Sequence[Place | None], outputs: Sequence[Place | Reduction]
    ) -> Iterator[tuple[str, ...]]:
        sizes = {place[1].elements for place in (*inputs, *outputs) if isinstance(place, tuple)} | {units}
        able = [path for path, number in self.arguments.items() if number in sizes and number % units == 0]
        if any(inputs):
            yield ()
        for count in range(1, len(able) + 1):
            yield from combinations(able, count)

    def _holds(self, split: ProbedSplit, parts: int) -> bool:
        mesh = mesh_of(parts)
        inputs = [
            layout_of(place, x.ndim, mesh, "sum" if k in split.added else None)
            for k, (place, x) in enumerate(zip(split.inputs, self.inputs, strict=True))
        ]
        outputs = [layout_of(place, y.ndim, mesh) for place, y in zip(split.outputs, self.outputs, strict=True)]
        ranks: list[Sequence[Tensor]] = []
        for index in range(parts):
            mine = chunk_bounds(split.units, parts, index)[1]
            op = with_numbers(self.op, {path: self.arguments[path] // split.units * mine for path in split.shares})
            local = [local_value(x, layout, mesh, index) for x, layout in zip(self.inputs, inputs, strict=True)]
            try:
                ranks.append(self.run(op, local))
            except Exception:  # it can't run on such shards, with any error
                return False
            if len(ranks[-1]) != len(self.outputs):
                return False
        return not any(
            apart([results[at] for results in ranks], self.outputs[at], layout, mesh)
            for at, layout in enumerate(outputs)
        )

    # Linearity.

    def _linear(self) -> tuple[tuple[int, ...], ...]:
        """Inputs in which the op is linear: each by itself, then several jointly."""
        floats = [k for k, x in enumerate(self.inputs) if x.is_floating_point() or x.is_complex()]
        if not all(y.is_floating_point() or y.is_complex() for y in self.outputs):
            return ()
        groups: list[tuple[int, ...]] = []
        for count in range(1, len(floats) + 1):
            rest = [k for k in floats if not any(k in group for group in groups)]
            for group in islice(combinations(rest, count), TRIES):
                if not any(k in other for other in groups for k in group) and self._is_linear(group):
                    groups.append(group)
        return tuple(sorted(groups))

    def _is_linear(self, group: Sequence[int]) -> bool:
        a, b = 2.0, -0.5
        pairs = list(enumerate(zip(self.inputs, self.other, strict=True)))
        other = [y if k in group else x for k, (x, y) in pairs]
        mixed = [a * x + b * y if k in group else x for k, (x, y) in pairs]
        try:
            two, both = self.run(self.op, other), self.run(self.op, mixed)
        except Exception:  # it rejects the values
            return False
        return all(
            x.shape == y.shape == z.shape and not difference(z, a * x + b * y)
            for x, y, z in zip(self.outputs, two, both, strict=True)
        )


def layout_of(place: Place | Reduction | None, rank: int, mesh: Mesh, partial: Reduction | None = None) -> Layout:
    """The layout of a tensor in a split."""
    if isinstance(place, tuple):
        dim, block = place
        shard = make_shard(Axis(name=AXIS, size=mesh.size), (block,))
        return make_layout([[shard] if at == dim else [] for at in range(rank)])
    kind = place or partial
    return replicated(rank) if kind is None else replicated(rank).with_placement(AXIS, Partial(kind))


def _rest(place: Place | Reduction | None) -> int:
    return place[1].elements // place[1].size if isinstance(place, tuple) else 1


def _nested(outer: Block, inner: Block) -> bool:
    """Whether the second block lies within the units of the first."""
    return inner.outer % (outer.outer * outer.size) == 0


def _another(x: Tensor, other: Tensor) -> Tensor:
    """Other numbers of the same kind, different everywhere."""
    if x.dtype == torch.bool:
        return ~x
    if not x.is_floating_point() and not x.is_complex():
        top = max(2, int(torch.maximum(x.max(), other.max())) + 1)
        return (x + 1 + other % (top - 1)) % top
    return torch.where(x == other, x + 1, other)


def _changed(x: Tensor, y: Tensor) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return ~torch.isclose(x, y, rtol=1e-9, atol=1e-11, equal_nan=True)
    return x != y


def _differ(x: Tensor, y: Tensor) -> bool:
    return x.shape != y.shape or bool(_changed(x, y).any())

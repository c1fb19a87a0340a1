"""How a tensor lies on a mesh: axes, shards, placements, layouts.

An **axis** is a mesh's, a **dim** is a tensor's. A `Layout` says for every dim which axes shard it, in
order from major to minor, and for every other axis in which state the copies on that axis are:

    state            letter   the value is             its gradient is
    --------------   ------   ----------------------   ----------------------
    Shard            S(dim)   sharded                  sharded the same way
    INVARIANT        I        replicated               replicated
    REPLICATE        R        replicated               a pending sum
    PARTIAL          P        a pending sum            replicated

These four are all there are: no op pairs a value and a gradient in another way. Nothing here knows about
torch, ops or time.

A dim is sharded in **blocks**, because real dims are fused. The rows of a QKV weight are `(3 h e)`;
sharding `h` over two ranks gives each of them three runs of rows:

    rows   q0 q1 q2 q3 | k0 k1 k2 k3 | v0 v1 v2 v3      Block(outer=3, size=4, inner=e)
    rank 0 q0 q1         k0 k1         v0 v1
    rank 1       q2 q3         k2 k3         v2 v3
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Literal

from .errors import LayoutError

Reduction = Literal["sum", "max", "min"]

MB = "mb"
"""The axis in time: the coordinate on it is the number of the microbatch that runs."""

MOST_DEVICES = 2**17
"""Of a mesh or a cluster: more than any has, and few enough to list them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """A named direction of a mesh."""

    name: str
    size: int

    def __post_init__(self) -> None:
        if not self.name.isidentifier():
            raise LayoutError(f"axis name {self.name!r} is not an identifier; use a name such as 'dp' or 'tp'")
        if self.size < 1:
            raise LayoutError(f"axis {self.name} has size {self.size}; an axis has at least one device")


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Devices in a grid. The last axis is the one whose neighbours are next to each other."""

    axes: tuple[Axis, ...]
    devices: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [axis.name for axis in self.axes]
        if len(set(names)) != len(names):
            raise LayoutError(f"axis names repeat: {', '.join(names)}")
        count = math.prod(axis.size for axis in self.axes if axis.name != MB)
        if count > MOST_DEVICES:  # before they are listed
            raise LayoutError(f"mesh {self} has {count} devices; a mesh has at most {MOST_DEVICES}")
        if not self.devices:
            object.__setattr__(self, "devices", tuple(range(self.size)))
        if len(self.devices) != self.size or len(set(self.devices)) != self.size:
            raise LayoutError(f"mesh {self} needs {self.size} distinct devices, got {len(set(self.devices))}")

    def __str__(self) -> str:
        return " x ".join(f"{axis.name}={axis.size}" for axis in self.axes) or "one device"

    @property
    def size(self) -> int:
        return math.prod(axis.size for axis in self.axes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(axis.name for axis in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        return {axis.name: axis.size for axis in self.axes}

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise LayoutError(f"the mesh {self} has no axis {name!r}")

    def coordinates(self, device: int) -> dict[str, int]:
        """Where a device stands on each axis."""
        place = self.devices.index(device)
        coordinates: dict[str, int] = {}
        for axis in reversed(self.axes):
            place, coordinates[axis.name] = divmod(place, axis.size)
        return {name: coordinates[name] for name in self.names}

    def groups(self, names: Iterable[str]) -> tuple[tuple[int, ...], ...]:
        """The sets of devices that differ only in the named axes, in a fixed order."""
        chosen = tuple(axis for axis in self.axes if axis.name in set(names))
        others = tuple(axis for axis in self.axes if axis not in chosen)
        grid = {tuple(self.coordinates(device).values()): device for device in self.devices}
        groups = []
        for fixed in product(*(range(axis.size) for axis in others)):
            at = dict(zip((axis.name for axis in others), fixed, strict=True))
            group = []
            for moving in product(*(range(axis.size) for axis in chosen)):
                at.update(zip((axis.name for axis in chosen), moving, strict=True))
                group.append(grid[tuple(at[name] for name in self.names)])
            groups.append(tuple(group))
        return tuple(groups)


def chunk_bounds(size: int, parts: int, index: int) -> tuple[int, int]:
    """Start and length of one part of `size` units, as `torch.chunk` cuts them (the last may be empty)."""
    chunk = -(-size // parts)
    start = min(index * chunk, size)
    return start, min(chunk, size - start)


def fills_every_chunk(size: int, parts: int) -> bool:
    """Whether every part of `size` units gets something."""
    return chunk_bounds(size, parts, parts - 1)[1] > 0


@dataclass(frozen=True, slots=True)
class Block:
    """`outer` runs of `size` units of `inner` elements; an axis takes a share of the units of every run."""

    outer: int
    size: int
    inner: int

    @property
    def elements(self) -> int:
        return self.outer * self.size * self.inner

    def local(self, parts: int, index: int) -> int:
        return self.outer * chunk_bounds(self.size, parts, index)[1] * self.inner


@dataclass(frozen=True, slots=True, kw_only=True)
class Shard:
    """One axis cutting one dim: `repeat` times the same row of blocks, one block for each section."""

    axis: str
    blocks: tuple[Block, ...]
    repeat: int = 1

    @property
    def elements(self) -> int:
        return self.repeat * sum(block.elements for block in self.blocks)

    def even(self, parts: int) -> bool:
        return all(block.size % parts == 0 for block in self.blocks)

    def local(self, parts: int, index: int) -> int:
        """How many elements of the dim are left on the device at `index`."""
        return self.repeat * sum(block.local(parts, index) for block in self.blocks)

    def spans(self, parts: int, index: int) -> list[tuple[int, int]]:
        """The (start, length) runs that the device at `index` keeps, neighbours joined."""
        spans: list[tuple[int, int]] = []
        at = 0
        for _ in range(self.repeat):
            for block in self.blocks:
                start, length = chunk_bounds(block.size, parts, index)
                for _ in range(block.outer):
                    if length:
                        _append_span(spans, at + start * block.inner, length * block.inner)
                    at += block.size * block.inner
        return spans

    def simple(self, parts: int) -> bool:
        """Whether each device keeps one run (a plain contiguous cut)."""
        return self.repeat == 1 and len(self.blocks) == 1 and self.blocks[0].outer == 1


def _append_span(spans: list[tuple[int, int]], start: int, length: int) -> None:
    if spans and spans[-1][0] + spans[-1][1] == start:
        spans[-1] = (spans[-1][0], spans[-1][1] + length)
    else:
        spans.append((start, length))


def make_shard(axis: Axis, blocks: Sequence[Block], repeat: int = 1) -> Shard:
    """A cut in its one canonical form, so that equal cuts compare equal."""
    normal = tuple(
        Block(b.outer, axis.size, b.size // axis.size * b.inner) if b.size % axis.size == 0 else b for b in blocks
    )
    if len(normal) == 1 and repeat > 1:
        normal, repeat = (Block(normal[0].outer * repeat, normal[0].size, normal[0].inner),), 1
    return Shard(axis=axis.name, blocks=normal, repeat=repeat)


def contiguous_shard(axis: Axis, size: int) -> Shard:
    """The contiguous cut of a dim of `size` elements."""
    return make_shard(axis, (Block(1, size, 1),))


@dataclass(frozen=True, slots=True)
class Invariant:
    """The value is the same everywhere on the axis, and so is its gradient."""

    def __str__(self) -> str:
        return "invariant"


@dataclass(frozen=True, slots=True)
class Replicate:
    """The value is the same everywhere on the axis; its gradient is a pending sum over the axis."""

    def __str__(self) -> str:
        return "replicate"


@dataclass(frozen=True, slots=True)
class Partial:
    """The value is the reduction of what the devices of the axis hold; its gradient is whole."""

    op: Reduction = "sum"

    def __str__(self) -> str:
        return f"partial {self.op}"


Placement = Invariant | Replicate | Partial
INVARIANT = Invariant()
REPLICATE = Replicate()
PARTIAL = Partial()


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shards of every dim, major to minor, and the placement on every other axis (INVARIANT if not listed)."""

    shards: tuple[tuple[Shard, ...], ...]
    rest: tuple[tuple[str, Placement], ...] = ()
    _hash: int = field(init=False, repr=False, compare=False)  # asked often

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash((self.shards, self.rest)))
        rest = [name for name, _ in self.rest]
        names = [shard.axis for dim in self.shards for shard in dim] + rest
        if len(names) > 1 and len(set(names)) != len(names):
            raise LayoutError(f"an axis is used twice in one layout: {', '.join(names)}")
        if rest and (rest != sorted(rest) or any(placement == INVARIANT for _, placement in self.rest)):
            raise LayoutError("the rest of a layout is sorted and lists no INVARIANT axis; build it with make_layout")

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[object, ...]:
        return make_layout, (self.shards, dict(self.rest))  # another process has other hashes

    def placement(self, axis: str) -> Placement | None:
        """The placement on an axis, or None where the axis cuts a dim."""
        if self.shard_of(axis) is not None:
            return None
        return next((placement for name, placement in self.rest if name == axis), INVARIANT)

    def shard_of(self, axis: str) -> tuple[int, Shard] | None:
        """The dim that an axis cuts, with the cut."""
        for dim, shards in enumerate(self.shards):
            for shard in shards:
                if shard.axis == axis:
                    return dim, shard
        return None

    @property
    def axes(self) -> frozenset[str]:
        """The axes on which this layout is not simply INVARIANT."""
        return frozenset(shard.axis for dim in self.shards for shard in dim) | {name for name, _ in self.rest}

    def gradient(self) -> Layout:
        """The layout of the gradient that belongs to a value with this layout."""
        flipped = tuple((name, PARTIAL) for name, placement in self.rest if placement == REPLICATE)
        return Layout(shards=self.shards, rest=flipped)

    def with_placement(self, axis: str, placement: Placement) -> Layout:
        rest = {name: old for name, old in self.rest if name != axis}
        return make_layout(self.shards, {**rest, axis: placement})

    def with_shard(self, dim: int, shard: Shard) -> Layout:
        """This layout with one more cut, minor to those that are there."""
        shards = tuple((*old, shard) if at == dim else old for at, old in enumerate(self.shards))
        return make_layout(shards, {name: placement for name, placement in self.rest if name != shard.axis})

    def without_shard(self, axis: str) -> Layout:
        shards = tuple(tuple(shard for shard in shards if shard.axis != axis) for shards in self.shards)
        return Layout(shards=shards, rest=self.rest)

    def local_shape(self, shape: Sequence[int], sizes: Mapping[str, int], at: Mapping[str, int]) -> tuple[int, ...]:
        """The shape that the device at coordinates `at` holds."""
        local = []
        for size, shards in zip(shape, self.shards, strict=True):
            for shard in shards:
                if shard.elements != size:
                    raise LayoutError(f"a cut of {shard.elements} elements over {shard.axis} meets a dim of {size}")
                size = shard.local(sizes[shard.axis], at[shard.axis])
            local.append(size)
        return tuple(local)

    def __str__(self) -> str:
        dims = [" ".join(shard.axis for shard in shards) or "." for shards in self.shards]
        rest = [f"{name}: {placement}" for name, placement in self.rest]
        return f"[{', '.join(dims)}]" + (f" ({', '.join(rest)})" if rest else "")


def join_shards(shards: Sequence[Shard], sizes: Mapping[str, int]) -> Shard | None:
    """Shards of a dim, one after the other, as one over the product of their axes; None where none does that.

    One does where each splits the runs that those before it leave, evenly: `(h e)` split on h by 2 and again by 2 is h
    split by 4, but h by 2 and then e by 2 leaves no head in one part.
    """
    first, *others = shards
    parts = sizes[first.axis]
    blocks = [Block(b.outer, parts, b.size // parts * b.inner) for b in first.blocks]
    if not all(shard.even(sizes[shard.axis]) and shard.repeat == first.repeat for shard in shards):
        return None
    for shard in others:
        if [(b.outer, b.size * b.inner) for b in shard.blocks] != [(b.outer, b.inner) for b in blocks]:
            return None
        parts *= sizes[shard.axis]
        blocks = [Block(b.outer, parts, b.inner // sizes[shard.axis]) for b in blocks]
    return Shard(axis="_".join(shard.axis for shard in shards), blocks=tuple(blocks), repeat=first.repeat)


def make_layout(shards: Iterable[Iterable[Shard]], rest: Mapping[str, Placement] | None = None) -> Layout:
    """A layout from loose parts."""
    ordered = sorted((name, placement) for name, placement in (rest or {}).items() if placement != INVARIANT)
    return Layout(shards=tuple(tuple(dim_shards) for dim_shards in shards), rest=tuple(ordered))


def replicated(rank: int) -> Layout:
    """The layout of a tensor with `rank` dims that every device holds."""
    return Layout(shards=((),) * rank)


Span = tuple[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRegion:
    """What one device holds of a tensor: for each dim the runs of indices, in local order."""

    shape: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]

    @property
    def local_shape(self) -> tuple[int, ...]:
        return tuple(sum(length for _, length in runs) for runs in self.spans)

    @property
    def boxes(self) -> tuple[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]], ...]:
        """(offset in the whole, offset in the local tensor, sizes) for each box."""
        per_dim = []
        for runs in self.spans:
            at, steps = 0, []
            for start, length in runs:
                steps.append((start, at, length))
                at += length
            per_dim.append(steps)
        return tuple(
            (tuple(s[0] for s in box), tuple(s[1] for s in box), tuple(s[2] for s in box)) for box in product(*per_dim)
        )


def local_region(layout: Layout, shape: Sequence[int], sizes: Mapping[str, int], at: Mapping[str, int]) -> LocalRegion:
    """The piece of a tensor that the device at coordinates `at` holds."""
    spans = []
    for size, shards in zip(shape, layout.shards, strict=True):
        runs: list[Span] = [(0, size)] if size else []
        for shard in shards:
            runs = _restrict(runs, shard.spans(sizes[shard.axis], at[shard.axis]))
        spans.append(tuple(runs))
    return LocalRegion(shape=tuple(shape), spans=tuple(spans))


def _restrict(runs: Sequence[Span], inside: Sequence[Span]) -> list[Span]:
    """`kept` counts along the concatenation of `runs`; say it in the coordinates that `runs` is in."""
    common: list[Span] = []
    for start, length in inside:
        base = 0
        for run_start, run_length in runs:
            low, high = max(start, base), min(start + length, base + run_length)
            if low < high:
                _append_span(common, run_start + low - base, high - low)
            base += run_length
    return common

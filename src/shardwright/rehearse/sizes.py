"""Small sizes for the atoms of a graph, under which a plan shards every dim as at the real sizes.

A size maps to the same small one everywhere, so that equal sizes stay equal and larger ones larger; sizes that differ
by little (a sequence and its labels, shifted by one) keep their difference. Dims are products and concatenations of
atoms and follow from them. Even shards stay even, uneven ones uneven, and a device with an empty shard still has an
empty one:

    128256 on tp=8    ->   12 on tp=2                   even
     50257 on tp=8    ->   13 on tp=3: 5, 5, 3          uneven; two devices would hide an off-by-one
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product

from ..errors import PlanError
from ..layout import MB, Mesh, fills_every_chunk
from ..rules import FAN, Analysis
from ..rules.atoms import Dim
from ..rules.role import PASS_PARTIAL

NEAR = 2
"""Sizes that differ by at most this keep their difference,"""

TINY = 8
"""if they are larger than this."""

LONGEST, SHORT = 4, 8
"""The maximum size of an axis; short axes of the plan stay as they are."""

TRIES = 4096

Axes = tuple[tuple[str, int], ...]
"""The axes that shard something, each with its size, in order."""


@dataclass(frozen=True, slots=True)
class Shared:
    """An atom and the axes that shard it. `even`: only its dim is sharded, so it need only divide a multiple."""

    atom: int
    axes: Axes
    even: bool = False


@dataclass
class Sizes:
    """The small size of every atom. `fixed` are atoms with a given size: the real one, or that of an op's output."""

    analysis: Analysis
    images: Mapping[int, int]
    fixed: dict[int, int] = field(default_factory=dict)
    because: dict[int, str] = field(default_factory=dict)  # the op that fixed an atom's size

    def atom(self, atom: int) -> int:
        if atom in self.fixed:
            return self.fixed[atom]
        sections = self.analysis.atoms.sections(atom)
        if sections is not None:
            return sum(self.dim(section) for section in sections)
        return self.images[self.analysis.atoms.size[atom]]

    def dim(self, dim: Dim) -> int:
        total = 1
        for atom in self.analysis.atoms.expand(dim):
            total *= self.atom(atom)
        return total

    def shape(self, value: str) -> tuple[int, ...]:
        return tuple(self.dim(dim) for dim in self.analysis.dims[value])

    def fix(self, atom: int, size: int, because: str) -> bool:
        """Fix the size of an atom; returns whether that changes anything."""
        changed = self.fixed.get(atom) != size
        self.fixed[atom] = size
        if changed:
            self.because[atom] = because
        return changed

    def keep(self, atoms: Iterable[int], because: str) -> bool:
        """Keep atoms at their real sizes; returns whether that changes anything."""
        changed = [self.fix(atom, self.analysis.atoms.size[atom], because) for atom in atoms]  # all of them
        return any(changed)

    def kept(self) -> tuple[str, ...]:
        """Atoms with their real sizes, and the ops that require it."""
        total: dict[str, set[int]] = {}
        for atom, size in self.fixed.items():
            if size == self.analysis.atoms.size[atom]:
                total.setdefault(self.because[atom], set()).add(size)
        return tuple(f"{', '.join(map(str, sorted(sizes)))} for {op}" for op, sizes in total.items())


def leaves(analysis: Analysis, dim: Dim) -> Iterator[int]:
    """The atoms of a dim, concatenated sections expanded."""
    for atom in analysis.atoms.expand(dim):
        sections = analysis.atoms.sections(atom)
        if sections is None:
            yield atom
        else:
            for section in sections:
                yield from leaves(analysis, section)


def shared_atoms(analysis: Analysis, mesh: Mesh, name: str, choice: Mapping[str, str]) -> Iterator[Shared]:
    """What the choice of an op shards, over axes in mesh order."""
    signature = analysis.signatures[name]
    uses: dict[int, list[tuple[str, int]]] = {}
    for axis in mesh.axes:
        picked = choice.get(axis.name)
        if picked is None or picked == FAN or picked.startswith(PASS_PARTIAL) or axis.size == 1:
            continue
        role = signature.role(picked)
        beside = signature.beside(role.label)
        for atom in (role.atom,) if beside is None else (role.atom, beside):
            uses.setdefault(atom, []).append((axis.name, axis.size))
    return (Shared(atom, tuple(axes)) for atom, axes in uses.items())


def small_axes(
    analysis: Analysis, shared: Iterable[Shared], axes: Mapping[str, int], microbatches: int
) -> Iterator[dict[str, int]]:
    """Sizes for the axes, best first: two devices, three where something is sharded unevenly; microbatches as given.

    Then larger ones, preferring those that keep the order of the axes by length: the cheapest path between two layouts
    may depend on it.
    """
    least = {name: min(size, 2) for name, size in axes.items()}
    for use in shared:
        left = analysis.atoms.size[use.atom]
        for name, size in () if use.even else use.axes:
            if name != MB and (left % size or not fills_every_chunk(left, size)):
                least[name] = min(axes[name], 3)
            left = -(-left // size)

    def turned(lengths: Sequence[int]) -> int:
        both = list(zip(axes.values(), lengths, strict=True))
        return sum((a < b) != (x < y) for a, x in both for b, y in both)

    def candidates(name: str, size: int) -> list[int]:
        return sorted({*range(least[name], min(size, LONGEST) + 1), *([size] if size <= SHORT else [])})

    every = product(*(candidates(name, size) for name, size in axes.items()))
    first = tuple(least.values())
    order = sorted(every, key=lambda lengths: (lengths != first, turned(lengths), math.prod(lengths)))
    return ({**dict(zip(axes, lengths, strict=True)), MB: microbatches} for lengths in order)


def choose_sizes(analysis: Analysis, shared: Iterable[Shared], small: Mapping[str, int], gap: int = 1) -> Sizes:
    """Small sizes for all atoms of a graph, for the sizes of the axes, at least `gap` apart where possible."""
    real = analysis.atoms.size
    uses: dict[int, set[Shared]] = {}
    for use in shared:
        if analysis.atoms.sections(use.atom) is None:
            uses.setdefault(real[use.atom], set()).add(use)
    there = {real[atom] for dims in analysis.dims.values() for dim in dims for atom in leaves(analysis, dim)}
    images: dict[int, int] = {}
    top = 1
    for cluster in _clusters(sorted(there)):
        base = _smallest(cluster, uses, small, top + gap, set(images.values()))
        if base is not None:
            images |= {size: base + size - cluster[0] for size in cluster}
        for size in cluster if base is None else ():  # they are sharded differently, and can't stay close
            alone = _smallest([size], uses, small, top + gap, set(images.values()))
            if alone is None:
                raise _refusal(size, uses)
            images[size] = alone
            top = max(top, alone)
        top = max(top, images[cluster[-1]])
    return Sizes(analysis, images)


def _refusal(size: int, uses: Mapping[int, set[Shared]]) -> PlanError:
    over = {" x ".join(f"{name}={count}" for name, count in use.axes) for use in uses[size]}
    return PlanError(
        f"the plan shards a size of {size} over {' and over '.join(sorted(over))}, and no small size is sharded in the "
        "same way, so it can't be rehearsed; plan for another batch or mesh"
    )


def _clusters(sizes: Sequence[int]) -> Iterator[list[int]]:
    """Sizes that are close to each other, in order."""
    cluster: list[int] = []
    for size in sizes:
        if cluster and (cluster[0] <= TINY or size - cluster[-1] > NEAR):
            yield cluster
            cluster = []
        cluster.append(size)
    if cluster:
        yield cluster


def _smallest(
    cluster: Sequence[int], uses: Mapping[int, set[Shared]], small: Mapping[str, int], start: int, used: set[int]
) -> int | None:
    """The smallest image of the first of some sizes for which all are sharded as in the plan.

    Larger than the images of smaller sizes, if possible: a batch of one sample per device may have none.
    """
    first = cluster[0]
    own: tuple[int, ...] = (first,) if start <= first <= 3 else ()
    fresh = (base for base in range(2, start) if not used & {base + size - first for size in cluster})
    for base in chain(own, range(start, start + TRIES), fresh, range(2, start)):
        if all(_alike(size, base + size - first, use, small) for size in cluster for use in uses.get(size, ())):
            return base
    return None


def _alike(size: int, image: int, shared: Shared, small: Mapping[str, int]) -> bool:
    """Whether axes shard a small size like the real one: evenly or not, with empty shards or not."""
    few = [(count, min(small[name], count)) for name, count in shared.axes]
    if shared.even:
        return not image % math.prod(now for _, now in few)
    for count, now in few:
        if (size % count == 0) != (image % now == 0) or fills_every_chunk(size, count) != fills_every_chunk(image, now):
            return False
        size, image = -(-size // count), -(-image // now)
    return (size > 1) == (image > 1)  # the local dim must not become 1

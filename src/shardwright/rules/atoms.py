"""Atoms: what dims are made of, shared across ops by unification.

A dim is a product of atoms, outermost first. An atom is a leaf, a link to other atoms
that it turned out to equal (its factors), or a row of sections:

    Dim   = Atom*                      (3 h e)  is three atoms; a dim of size 1 is none
    Atom  = leaf | Dim | Dim '|' Dim '|' ...

`unify` makes two dims one as far as their sizes allow and stops where they clash. What
is left over is simply different atoms, so that a clash blocks the op that caused it and
nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from ..layout import Axis, Block, Shard, make_shard

Dim = tuple[int, ...]
"""Atoms multiplied, outermost first."""


@dataclass(slots=True)
class Atoms:
    """The table of all atoms of a graph."""

    size: list[int] = field(default_factory=list)
    parts: list[tuple[Dim, ...] | None] = field(default_factory=list)  # None: a leaf; one Dim: factors; more: sections
    known: dict[Any, Any] | None = None  # answers, kept once the table no longer changes

    def freeze(self) -> None:
        """From now on nothing is unified, and answers are kept."""
        self.known = {}

    def fresh(self, size: int) -> Dim:
        if size == 1:
            return ()
        self.size.append(size)
        self.parts.append(None)
        return (len(self.size) - 1,)

    def product(self, dim: Dim) -> int:
        return math.prod(self.size[atom] for atom in dim)

    def row(self, sections: Sequence[Dim]) -> Dim:
        """A dim of several sections."""
        if len(sections) == 1:
            return sections[0]
        (atom,) = self.fresh(sum(self.product(section) for section in sections))
        self.parts[atom] = tuple(sections)
        return (atom,)

    def expand(self, dim: Dim) -> Dim:
        """The same dim in leaves and rows of sections."""
        if self.known is not None:
            atoms = self.known.get(dim)
            if atoms is None:
                atoms = self.known[dim] = self._expand(dim)
            return cast(Dim, atoms)
        return self._expand(dim)

    def _expand(self, dim: Dim) -> Dim:
        atoms: list[int] = []
        stack = list(reversed(dim))
        while stack:
            atom = self._root(stack.pop())
            parts = self.parts[atom]
            if parts is not None and len(parts) == 1:
                stack.extend(reversed(parts[0]))
            else:
                atoms.append(atom)
        return tuple(atoms)

    def _root(self, atom: int) -> int:
        """The atom at the end of a row of links, which then all lead there: in deep models such rows are long."""
        passed: list[int] = []
        parts = self.parts[atom]
        while parts is not None and len(parts) == 1 and len(parts[0]) == 1:
            passed.append(atom)
            (atom,) = parts[0]
            parts = self.parts[atom]
        for passed_atom in passed[:-1]:
            self.parts[passed_atom] = ((atom,),)
        return atom

    def sections(self, atom: int) -> tuple[Dim, ...] | None:
        parts = self.parts[atom]
        return parts if parts is not None and len(parts) > 1 else None

    def divide(self, dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
        """Cut a product into groups of the given sizes, refining leaves; None where that can't be."""
        atoms = list(reversed(self.expand(dim)))
        groups: list[Dim] = []
        for size in sizes:
            group: list[int] = []
            while size > 1:
                if not atoms:
                    return None
                atom = atoms.pop()
                own = self.size[atom]
                if size % own == 0:
                    group.append(atom)
                    size //= own
                elif own % size == 0 and self.parts[atom] is None:
                    head, tail = self._split_leaf(atom, size)
                    group.append(head)
                    atoms.append(tail)
                    size = 1
                else:
                    return None
            groups.append(tuple(group))
        return groups if not atoms else None

    def _split_leaf(self, atom: int, outer: int) -> tuple[int, int]:
        (head,), (tail,) = self.fresh(outer), self.fresh(self.size[atom] // outer)
        self.parts[atom] = ((head, tail),)
        return head, tail

    def divide_row(self, dim: Dim, sizes: Sequence[int]) -> list[Dim] | None:
        """Cut a dim into sections of the given sizes; None where that can't be."""
        atoms = self.expand(dim)
        if len(atoms) != 1:
            return None
        sections = self.sections(atoms[0])
        if sections is None:  # a leaf
            self.parts[atoms[0]] = sections = tuple(self.fresh(size) for size in sizes)
            return list(sections)
        own = [self.product(section) for section in sections]
        return list(sections) if own == list(sizes) else None

    def unify(self, a: Dim, b: Dim) -> bool:
        """Make two dims one, from the outermost factor on; False if something is left that differs."""
        left, right = list(reversed(self.expand(a))), list(reversed(self.expand(b)))
        while left and right:
            (x, *inner), (y, *other) = self.expand((left.pop(),)), self.expand((right.pop(),))  # links made on the way
            left.extend(reversed(inner))
            right.extend(reversed(other))
            if x == y:
                continue
            if self.size[x] == self.size[y]:
                if not self._unify_equal(x, y):
                    return False
            elif self.size[y] % self.size[x] == 0 and self.parts[y] is None:
                head, tail = self._split_leaf(y, self.size[x])
                self._unify_equal(x, head)
                right.append(tail)
            elif self.size[x] % self.size[y] == 0 and self.parts[x] is None:
                head, tail = self._split_leaf(x, self.size[y])
                self._unify_equal(head, y)
                left.append(tail)
            else:
                return False
        return not left and not right

    def _unify_equal(self, x: int, y: int) -> bool:
        left, right = self.sections(x), self.sections(y)
        if left is None and self.parts[x] is None:
            self.parts[x] = ((y,),)
            return True
        if right is None and self.parts[y] is None:
            self.parts[y] = ((x,),)
            return True
        if left is None or right is None or [self.product(s) for s in left] != [self.product(s) for s in right]:
            return False
        unified = True
        for s, t in zip(left, right, strict=True):
            unified = self.unify(s, t) and unified
        return unified

    def splittable(self, dim: Dim) -> Iterator[int]:
        """The atoms that an axis may take: leaves, what all sections of a row share, or else the row itself."""
        for atom in dict.fromkeys(self.expand(dim)):
            sections = self.sections(atom)
            if sections is None:
                yield atom
                continue
            shared = [set(self.splittable(section)) for section in sections]
            common = [inner for inner in self.splittable(sections[0]) if all(inner in others for others in shared)]
            yield from common or [atom]

    def blocks(self, dim: Dim, atom: int) -> tuple[int, tuple[Block, ...]] | None:
        """(repeat, blocks) for taking `atom` in `dim`; None if the dim does not have it."""
        if self.known is not None:
            key = (dim, atom)
            if key not in self.known:
                self.known[key] = self._blocks(dim, atom)
            return cast("tuple[int, tuple[Block, ...]] | None", self.known[key])
        return self._blocks(dim, atom)

    def _blocks(self, dim: Dim, atom: int) -> tuple[int, tuple[Block, ...]] | None:
        atoms = self.expand(dim)
        for at, other in enumerate(atoms):
            outer, inner = self.product(atoms[:at]), self.product(atoms[at + 1 :])
            if other == atom:
                return 1, (Block(outer, self.size[atom], inner),)
            sections = self.sections(other)
            if sections is None:
                continue
            blocks = [self.blocks(section, atom) for section in sections]
            if all(part is not None and part[0] == 1 and len(part[1]) == 1 for part in blocks):
                rows = [part[1][0] for part in blocks if part is not None]
                return outer, tuple(Block(row.outer, row.size, row.inner * inner) for row in rows)
        return None

    def shard(
        self, dim: Dim, atom: int, axis: Axis, taken: Sequence[tuple[int, int]] = (), *, striped: bool = False
    ) -> Shard | None:
        """The shard that `axis` makes by taking `atom` of `dim`, after others have `taken` (atom, parts)."""
        blocks_of = self.blocks(dim, atom)
        if blocks_of is None:
            return None
        repeat, blocks = blocks_of
        left = {other: self.size[other] for other, _ in taken}
        for other, parts in taken:
            if left[other] % parts:
                return None
            left[other] //= parts
            if other == atom:
                blocks = tuple(Block(block.outer, block.size // parts, block.inner) for block in blocks)
                continue
            where = self.blocks(dim, other)
            if where is None or repeat != 1 or where[0] != 1 or len(blocks) != 1 or len(where[1]) != 1:
                return None
            (block,), (size,) = blocks, where[1]
            if size.outer * size.size <= blocks_of[1][0].outer:
                blocks = (Block(block.outer // parts, block.size, block.inner),)
            else:
                blocks = (Block(block.outer, block.size, block.inner // parts),)
        if striped:  # the innermost factor of the atom instead of the outermost
            if any(block.size % axis.size for block in blocks):
                return None
            blocks = tuple(Block(b.outer * b.size // axis.size, axis.size, b.inner) for b in blocks)
        return make_shard(axis, blocks, repeat)

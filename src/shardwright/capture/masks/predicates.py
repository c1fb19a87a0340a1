"""Conditions on the place of an element in a tensor, and their algebra.

    Affine      = constant + coefficient * index of a dim + ...          a whole number
    Predicate   = True | False
                | NonNegative(Affine)                                   Affine >= 0
                | Flag(value, place)                                    a boolean tensor, read at a place
                | Equal(value, place, value, place)                     two elements of tensors are the same
                | Ordered(value, place, place, number)                  one element + number >= another one
                | Conjunction(Predicate*) | Disjunction(Predicate*)

A place is one `Affine` for each dim of the tensor that is read. Every predicate stands for a boolean tensor: it is a
condition on the indices of that tensor's dims, so a view of it is a substitution of indices (`at`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

LARGEST = 64
"""Parts of a predicate. More than that is no structure, and not looked at."""


@dataclass(frozen=True, slots=True)
class Affine:
    constant: int
    terms: tuple[tuple[int, int], ...] = ()  # (dim, coefficient), by dim, none of them 0

    def __add__(self, other: Affine) -> Affine:
        return _affine(self.constant + other.constant, (*self.terms, *other.terms))

    def __sub__(self, other: Affine) -> Affine:
        return self + other.times(-1)

    def times(self, factor: int) -> Affine:
        return _affine(self.constant * factor, [(dim, factor * coefficient) for dim, coefficient in self.terms])

    def at(self, place: Sequence[Affine]) -> Affine:
        """With other indices: those of dim d become `place[d]`."""
        result = Affine(self.constant)
        for dim, coefficient in self.terms:
            result += place[dim].times(coefficient)
        return result

    def bounds(self, shape: Sequence[int]) -> tuple[int, int]:
        """The smallest and the largest that it can be in a tensor of this shape."""
        ends = [(0, coefficient * (shape[dim] - 1)) for dim, coefficient in self.terms]
        return self.constant + sum(map(min, ends)), self.constant + sum(map(max, ends))

    @property
    def dims(self) -> frozenset[int]:
        return frozenset(dim for dim, _ in self.terms)


Place = tuple[Affine, ...]


def _affine(constant: int, terms: Iterable[tuple[int, int]]) -> Affine:
    total: dict[int, int] = {}
    for dim, coefficient in terms:
        total[dim] = total.get(dim, 0) + coefficient
    return Affine(constant, tuple(sorted((dim, coefficient) for dim, coefficient in total.items() if coefficient)))


def index(dim: int) -> Affine:
    """The index of a dim."""
    return Affine(0, ((dim, 1),))


@dataclass(frozen=True, slots=True)
class NonNegative:
    number: Affine


@dataclass(frozen=True, slots=True)
class Flag:
    value: str
    place: Place
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Equal:
    value: str
    place: Place
    other: str
    other_place: Place
    negated: bool = False


@dataclass(frozen=True, slots=True)
class Ordered:
    value: str
    place: Place
    other_place: Place
    constant: int


@dataclass(frozen=True, slots=True)
class Conjunction:
    parts: tuple[Predicate, ...]


@dataclass(frozen=True, slots=True)
class Disjunction:
    parts: tuple[Predicate, ...]


Predicate = bool | NonNegative | Flag | Equal | Ordered | Conjunction | Disjunction


def zero(number: Affine) -> Predicate:
    """Whether a number is 0."""
    return conjunction([NonNegative(number), NonNegative(number.times(-1))])


def conjunction(parts: Iterable[Predicate]) -> Predicate:
    return _joined(parts, Conjunction, True)


def disjunction(parts: Iterable[Predicate]) -> Predicate:
    return _joined(parts, Disjunction, False)


def _joined(parts: Iterable[Predicate], kind: type[Conjunction] | type[Disjunction], neutral: bool) -> Predicate:
    flat: dict[Predicate, None] = {}
    for part in parts:
        if isinstance(part, bool):
            if part is not neutral:
                return part
        elif isinstance(part, kind):
            flat.update(dict.fromkeys(part.parts))
        else:
            flat[part] = None
    kept = _strongest(flat, kind is Conjunction)
    if any(negated(part) in kept for part in kept):
        return not neutral
    other = Disjunction if kind is Conjunction else Conjunction
    kept = [part for part in kept if not (isinstance(part, other) and any(inner in kept for inner in part.parts))]
    if not kept:
        return neutral
    return kept[0] if len(kept) == 1 else kind(tuple(kept))


def _strongest(parts: Iterable[Predicate], all_hold: bool) -> list[Predicate]:
    """Of bounds on one and the same number the one that decides."""
    bounds: dict[tuple[tuple[int, int], ...], int] = {}
    choose = min if all_hold else max
    rest: list[Predicate] = []
    for part in parts:
        if isinstance(part, NonNegative):
            terms, constant = part.number.terms, part.number.constant
            bounds[terms] = choose(bounds.get(terms, constant), constant)
        else:
            rest.append(part)
    return [*(_bound(Affine(constant, terms)) for terms, constant in bounds.items()), *rest]


def _bound(number: Affine) -> Predicate:
    return NonNegative(number) if number.terms else number.constant >= 0


def negated(predicate: Predicate) -> Predicate:
    if isinstance(predicate, bool):
        return not predicate
    if isinstance(predicate, NonNegative):  # of whole numbers: not n >= 0 is -n - 1 >= 0
        return NonNegative(predicate.number.times(-1) + Affine(-1))
    if isinstance(predicate, Conjunction):
        return disjunction(negated(part) for part in predicate.parts)
    if isinstance(predicate, Disjunction):
        return conjunction(negated(part) for part in predicate.parts)
    if isinstance(predicate, Ordered):
        return Ordered(predicate.value, predicate.other_place, predicate.place, -predicate.constant - 1)
    return replace(predicate, negated=not predicate.negated)


def rewritten(
    predicate: Predicate, change: Callable[[Affine], Affine], leaf: Callable[[Affine], Predicate]
) -> Predicate:
    """A predicate with other places, and with `leaf` of what has to be at least 0."""
    if isinstance(predicate, bool):
        return predicate
    if isinstance(predicate, NonNegative):
        return leaf(change(predicate.number))
    if isinstance(predicate, Flag):
        return replace(predicate, place=tuple(map(change, predicate.place)))
    if isinstance(predicate, Equal | Ordered):
        place, other = (tuple(map(change, place)) for place in (predicate.place, predicate.other_place))
        return _equality(predicate, place, other) if isinstance(predicate, Equal) else _order(predicate, place, other)
    join = conjunction if isinstance(predicate, Conjunction) else disjunction
    return join(rewritten(part, change, leaf) for part in predicate.parts)


def _equality(predicate: Equal, place: Place, other_place: Place) -> Predicate:
    if predicate.value == predicate.other and place == other_place:
        return not predicate.negated
    return replace(predicate, place=place, other_place=other_place)


def _order(predicate: Ordered, place: Place, other_place: Place) -> Predicate:
    return predicate.constant >= 0 if place == other_place else replace(predicate, place=place, other_place=other_place)


def at(predicate: Predicate, place: Sequence[Affine]) -> Predicate:
    """A predicate on the indices of another tensor, of which element i is the old one at `place`."""
    return rewritten(predicate, lambda number: number.at(place), _bound)


def within(predicate: Predicate, shape: Sequence[int]) -> Predicate:
    """A predicate without the conditions that hold everywhere or nowhere in a tensor of this shape."""

    def decided(number: Affine) -> Predicate:
        low, high = number.bounds(shape)
        return True if low >= 0 else False if high < 0 else NonNegative(number)

    return rewritten(predicate, lambda number: number, decided)


def size(predicate: Predicate) -> int:
    """How many parts a predicate has."""
    if isinstance(predicate, Conjunction | Disjunction):
        return sum(map(size, predicate.parts))
    return 1


def numbers_of(predicate: Predicate) -> Iterator[Affine | None]:
    """The numbers that decide about a predicate; None where data does."""
    if isinstance(predicate, Conjunction | Disjunction):
        for part in predicate.parts:
            yield from numbers_of(part)
    elif not isinstance(predicate, bool):
        yield predicate.number if isinstance(predicate, NonNegative) else None

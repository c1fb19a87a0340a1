"""What each element of a tensor is, as a function of its place.

Count(Affine)                      a whole number that grows with the indices: positions
Cases((Predicate, number)*)        one of a few numbers, decided by the place; the predicates exclude each other
Element(value, place, plus)        an element of another value of the graph, of which nothing more is known, and a
                                   number added to it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .predicates import Affine, Place, Predicate, at, disjunction, index, negated

Number = bool | int | float
MAX_CASES = 6


@dataclass(frozen=True, slots=True)
class Count:
    number: Affine


@dataclass(frozen=True, slots=True)
class Cases:
    cases: tuple[tuple[Predicate, Number], ...]


@dataclass(frozen=True, slots=True)
class Element:
    value: str
    place: Place
    plus: int = 0


Meaning = Count | Cases | Element


def moved(meaning: Meaning, place: Sequence[Affine]) -> Meaning:
    """The meaning of a tensor whose element i is the old one at `place`."""
    if isinstance(meaning, Count):
        return Count(meaning.number.at(place))
    if isinstance(meaning, Element):
        return Element(meaning.value, tuple(number.at(place) for number in meaning.place), meaning.plus)
    return exclusive([(at(predicate, place), number) for predicate, number in meaning.cases])


def broadcast(meaning: Meaning, shape: Sequence[int], target: Sequence[int]) -> Meaning:
    """The meaning of a tensor of `shape`, broadcast to `target`."""
    lead = len(target) - len(shape)
    place = [Affine(0) if length == 1 else index(lead + dim) for dim, length in enumerate(shape)]
    return moved(meaning, place)


def disjoint(outcomes: Sequence[tuple[Number, list[Predicate]]]) -> Cases | None:
    if not outcomes or len(outcomes) > MAX_CASES:
        return None
    if len(outcomes) == 1:
        return Cases(((True, outcomes[0][0]),))
    if len(outcomes) == 2:  # one is what the other is not: of the two the simpler way to say it
        first, other = sorted(outcomes, key=lambda outcome: len(outcome[1]))
        predicate = disjunction(first[1])
        return exclusive([(predicate, first[0]), (negated(predicate), other[0])])
    return exclusive([(disjunction(predicates), number) for number, predicates in outcomes])


def exclusive(cases: Sequence[tuple[Predicate, Number]]) -> Cases:
    return Cases(tuple((predicate, number) for predicate, number in cases if predicate is not False))


def boolean(predicate: Predicate) -> Cases:
    return exclusive([(predicate, True), (negated(predicate), False)])

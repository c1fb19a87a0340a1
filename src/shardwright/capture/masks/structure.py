"""From the condition under which a query sees a key to a `MaskStructure`, or to why there is none."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from ...ir import MaskStructure
from .meaning import Cases, Element, Meaning
from .predicates import (
    Affine,
    Conjunction,
    Disjunction,
    Equal,
    Flag,
    NonNegative,
    Place,
    Predicate,
    at,
    disjunction,
    index,
    numbers_of,
    within,
)

NEVER = -1e30
"""A finite number that is added to a score from which on its weight is 0 in any dtype, beside any other score."""


class NotStructured(Exception):
    """Why a mask stays as it is."""


def visible(meaning: Meaning, dtype: str) -> Predicate:
    """Where a mask lets a query see a key: where it is true, or adds 0."""
    if isinstance(meaning, Element) and dtype == "bool":
        return Flag(meaning.value, meaning.place)
    if not isinstance(meaning, Cases):
        raise NotStructured("its values are data")
    if dtype == "bool":
        return disjunction(predicate for predicate, number in meaning.cases if number)
    for _, number in meaning.cases:
        if number != 0 and not number <= NEVER:
            raise NotStructured(f"it adds {number:g} to scores")
    return disjunction(predicate for predicate, number in meaning.cases if number == 0)


def hides_with_a_number(meaning: Meaning) -> bool:
    """Whether a mask adds a finite number to scores: to a query that sees nothing it then gives uniform weights."""
    return isinstance(meaning, Cases) and any(-math.inf < number < 0 for _, number in meaning.cases)


def rows_of(predicate: Predicate, shape: Sequence[int]) -> dict[str, tuple[Place, ...]]:
    """The values that a condition reads, each with the places at which it does."""
    rows: dict[str, tuple[Place, ...]] = {}
    decided = within(predicate, shape)
    for part in decided.parts if isinstance(decided, Conjunction) else (decided,):
        if isinstance(part, Flag):
            rows[part.value] = (*rows.get(part.value, ()), part.place)
        elif isinstance(part, Equal):
            rows[part.value] = (*rows.get(part.value, ()), part.place, part.other_place)
    return rows


def structure_of(predicate: Predicate, shape: Sequence[int]) -> MaskStructure:
    """What a condition on the last two indices, query and key, says; `shape` is that of the scores."""
    query, key = index(len(shape) - 2), index(len(shape) - 1)
    known = MaskStructure()
    decided = within(predicate, shape)
    if decided is True:
        return known
    if decided is False:
        raise NotStructured("no query sees any key")
    band = _band(decided, query, key, shape)
    if band is not None:
        return band
    for part in decided.parts if isinstance(decided, Conjunction) else (decided,):
        known = _with(known, part, query, key, shape)
    return known


def _band(predicate: Predicate, query: Affine, key: Affine, shape: Sequence[int]) -> MaskStructure | None:
    """A condition on k - q alone that holds between two bounds.

    Its truth changes only where the truth of one of its parts does, so a few diagonals tell about all of them.
    """
    lowest, highest = 1 - shape[-2], shape[-1] - 1
    diagonals = {lowest, highest}
    for number in numbers_of(predicate):
        if number is None or (number - Affine(number.constant)).at(_swap(shape)) != Affine(number.constant) - number:
            return None  # it reads data, or does not depend on k - q alone
        factor = dict(number.terms)[len(shape) - 1]
        edge = -number.constant // factor
        diagonals |= {near for near in (edge - 1, edge, edge + 1) if lowest <= near <= highest}
    place = [Affine(0)] * len(shape)
    seen = []
    for diagonal in sorted(diagonals):
        place[-2:] = [Affine(max(0, -diagonal)), Affine(max(0, diagonal))]
        seen.append((diagonal, at(predicate, place) is True))
    inside = [diagonal for diagonal, holds in seen if holds]
    if not inside or not all(holds for diagonal, holds in seen if inside[0] <= diagonal <= inside[-1]):
        return None
    before = None if inside[0] == lowest else -inside[0]
    return MaskStructure(before=before, after=None if inside[-1] == highest else inside[-1])


def _with(known: MaskStructure, part: Predicate, query: Affine, key: Affine, shape: Sequence[int]) -> MaskStructure:
    if isinstance(part, NonNegative) and not known.prefix:
        if part.number.terms == (query - key).terms:  # k <= q + constant
            return replace(known, after=part.number.constant)
        if part.number.terms == (key - query).terms:
            return replace(known, before=part.number.constant)
    if isinstance(part, Flag) and part.place and part.place[-1] == key and not query.dims & _dims(part.place):
        return replace(known, padding=(*known.padding, f"~{part.value}" if part.negated else part.value))
    if isinstance(part, Equal) and not part.negated and part.value == part.other and known.documents is None:
        swapped = tuple(number.at(_swap(shape)) for number in part.place)
        if part.place and part.place[-1] in (query, key) and swapped == part.other_place:
            return replace(known, documents=part.value)
    if isinstance(part, Disjunction) and len(part.parts) == 2 and known.after is None and not known.prefix:
        return _prefix(known, part, query, key)
    raise NotStructured("its condition on queries and keys has no name")


def _prefix(known: MaskStructure, part: Disjunction, query: Affine, key: Affine) -> MaskStructure:
    """Causal, or among the first keys."""
    numbers = [inner.number for inner in part.parts if isinstance(inner, NonNegative)]
    causal = [number for number in numbers if number == query - key]
    first = [number for number in numbers if number.terms == key.times(-1).terms]
    if not causal or not first:
        raise NotStructured("its condition on queries and keys has no name")
    return replace(known, after=0, prefix=first[0].constant + 1)


def _dims(place: Sequence[Affine]) -> frozenset[int]:
    return frozenset().union(*(number.dims for number in place))


def _swap(shape: Sequence[int]) -> list[Affine]:
    """Query for key, and key for query."""
    place = [index(dim) for dim in range(len(shape))]
    place[-1], place[-2] = place[-2], place[-1]
    return place

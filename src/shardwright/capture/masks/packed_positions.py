"""Packed documents that are told by their positions, which start anew with each of them.

Document ids that count the places where positions don't go on by one,

    d = (positions.diff(prepend=...) != 1).cumsum(-1)

say more than where documents are: if d[q] == d[k], then positions[q] - positions[k] == q - k. So a condition on two
positions of one document is a condition on places, whatever the positions are.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..building.graph_builder import DraftOp, ValueInfo, ValueRef
from .meaning import Element
from .meanings import INTEGERS, Meanings
from .predicates import Affine, Conjunction, Equal, NonNegative, Ordered, Predicate, conjunction


def by_places(predicate: Predicate, meanings: Meanings) -> Predicate:
    """A condition in which what is said of two positions of one document is said of their places."""
    if not isinstance(predicate, Conjunction):
        return predicate
    known = set()
    for part in predicate.parts:
        if isinstance(part, Equal) and not part.negated and part.value == part.other:
            positions = _positions(part.value, meanings)
            if positions is not None and part.place[:-1] == part.other_place[:-1]:
                places = (part.place, part.other_place)
                read = frozenset(tuple(number.at(place) for number in positions.place) for place in places)
                known.add((positions.value, read))

    def change(part: Predicate) -> Predicate:
        if isinstance(part, Ordered) and (part.value, frozenset({part.place, part.other_place})) in known:
            return NonNegative(part.place[-1] - part.other_place[-1] + Affine(part.constant))
        return part

    return conjunction(map(change, predicate.parts))


def _positions(documents: str, meanings: Meanings) -> Element | None:
    """What goes on by one from a place to the next as long as ids stay the same; None if there is no such value."""
    value = _counted_breaks(documents, meanings.values.producers, meanings.builder.infos)
    meaning = None if value is None else meanings.of(value)
    return meaning if isinstance(meaning, Element) and not meaning.plus else None


def _counted_breaks(documents: str, producers: Mapping[str, DraftOp], infos: Mapping[str, ValueInfo]) -> str | None:
    last = len(infos[documents].shape) - 1
    counted = producers.get(documents)
    if counted is None or counted.target != "aten.cumsum.default" or counted.arguments["dim"] not in (-1, last):
        return None
    breaks = producers.get(counted.arguments["self"].name)
    if breaks is not None and breaks.target == "aten._to_copy.default":
        breaks = producers.get(breaks.arguments["self"].name)
    if breaks is None or breaks.target != "aten.ne.Scalar" or breaks.arguments["other"] != 1:
        return None
    steps = producers.get(breaks.arguments["self"].name)
    if steps is None or steps.target != "aten.diff.default":
        return None
    arguments = steps.arguments
    source, prepended = arguments["self"], arguments.get("prepend")
    if arguments.get("n", 1) != 1 or arguments.get("dim", -1) not in (-1, last) or arguments.get("append") is not None:
        return None
    if not isinstance(prepended, ValueRef) or infos[prepended.name].shape[-1] != 1:  # all ids may change by one number
        return None
    integers = infos[source.name].dtype in INTEGERS and infos[documents].dtype in INTEGERS
    return str(source.name) if integers and infos[source.name].shape == infos[documents].shape else None

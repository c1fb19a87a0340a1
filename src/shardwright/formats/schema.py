"""What the data of a file should be, written as it looks, and every place where it is something else.

    PLAN = record({"model": text(), "mesh": mapping(integer(1, MOST_DEVICES))}, {"notes": listing(text())})
    raise_faults(PlanError, "plan.json is not a valid plan:", PLAN(data))

A schema is a function from a value to its faults. A fault has the keys that lead to it from here; each level puts its
own in front, so that paths are only made for what is wrong.
"""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from ..errors import ShardwrightError, raise_all

Route = tuple[str | int, ...]
Faults = Sequence[tuple[Route, str]]
Schema = Callable[[Any], Faults]

MOST_FAULTS = 50  # that are shown; a file with more of them is another kind of file
LARGEST = 2**63 - 1
_SHOWN = reprlib.Repr()
_SHOWN.maxstring = _SHOWN.maxother = 60
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff]")


def raise_faults(kind: type[ShardwrightError], title: str, faults: Faults) -> None:
    """Raise one error with all faults, or return if there is none."""
    shown = [f"{where(route) or 'the file'} {message}" for route, message in faults[:MOST_FAULTS]]
    if len(faults) > MOST_FAULTS:
        shown.append(f"and {len(faults) - MOST_FAULTS} more")
    raise_all(kind, title, shown)


def where(route: Route) -> str:
    """A place in a file: entries.train[0].mesh."""
    words = [f"[{key}]" if isinstance(key, int) else f".{_plain(key)}" for key in route]
    return "".join(words).lstrip(".")


def _plain(key: str) -> str:
    return key if len(key) <= 80 and not _CONTROL.search(key) else show(key)


def show(value: Any) -> str:
    """A value in a few characters."""
    if isinstance(value, int) and abs(value) > 10**30:
        return f"a whole number of {value.bit_length()} bits"
    return _SHOWN.repr(value)


def _wrong(value: Any, wanted: str) -> Faults:
    return [((), f"should be {wanted}, is {show(value)}")]


def text(pattern: str | None = None, *, longest: int = 10_000, described: str = "text") -> Schema:
    """Text of printable characters; with a pattern, text that has it."""
    compiled = None if pattern is None else re.compile(pattern)

    def check(value: Any) -> Faults:
        if type(value) is not str or len(value) > longest or _CONTROL.search(value):
            return _wrong(value, f"{described} of at most {longest} characters")
        if compiled is not None and not compiled.fullmatch(value):
            return _wrong(value, described)
        return ()

    return check


def integer(low: int = -LARGEST - 1, high: int = LARGEST) -> Schema:
    """A whole number within bounds; true and false are none."""
    upper = {LARGEST: "2^63 - 1"}.get(high, str(high))
    lower = {-LARGEST - 1: "-2^63"}.get(low, str(low))

    def check(value: Any) -> Faults:
        if type(value) is int and low <= value <= high:
            return ()
        return _wrong(value, f"a whole number from {lower} to {upper}")

    return check


def number(*, low: float | None = None, finite: bool = True) -> Schema:
    """A number, finite if nothing else is said."""
    wanted = "a finite number" if finite else "a number"
    wanted += "" if low is None else f" of {low:g} or more"

    def check(value: Any) -> Faults:
        is_number = type(value) is float or (type(value) is int and abs(value) <= LARGEST)
        if is_number and (math.isfinite(value) or not finite) and (low is None or value >= low):
            return ()
        return _wrong(value, wanted)

    return check


def boolean() -> Schema:
    return literal(True, False)


def nothing() -> Schema:
    return literal(None)


def literal(*values: Any) -> Schema:
    """One of some values, of the same type."""
    wanted = " or ".join("null" if value is None else repr(value) for value in values)

    def check(value: Any) -> Faults:
        if any(type(value) is type(allowed) and value == allowed for allowed in values):
            return ()
        return _wrong(value, wanted)

    return check


def either(*schemas: Schema) -> Schema:
    """What fits one of several schemas; the faults of the first are shown."""

    def check(value: Any) -> Faults:
        faults = [schema(value) for schema in schemas]
        return min(faults, key=len)

    return check


def listing(item: Schema, *, most: int = 1_000_000, least: int = 0) -> Schema:
    """A list of alike items."""

    def check(value: Any) -> Faults:
        if type(value) is not list or not least <= len(value) <= most:
            return _wrong(value, f"a list of {least} to {most} items")
        return _cut(((at, *route), message) for at, part in enumerate(value) for route, message in item(part))

    return check


def mapping(item: Schema, key: Schema | None = None, *, most: int = 1_000_000) -> Schema:
    """Keys that are not known beforehand, with alike values."""
    name = key or text()

    def check(value: Any) -> Faults:
        if type(value) is not dict or len(value) > most:
            return _wrong(value, f"an object of at most {most} keys")
        own = [((), f"has a key that {message}") for part in value for _, message in name(part)]
        return own or _cut(((part, *route), message) for part, inner in value.items() for route, message in item(inner))

    return check


def record(
    needed: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None, *, others: bool = False
) -> Schema:
    """An object with these keys; with `others`, further keys may hold anything."""
    known = {**needed, **(optional or {})}

    def check(value: Any) -> Faults:
        if type(value) is not dict:
            return _wrong(value, "an object")
        faults: list[tuple[Route, str]] = [((key,), "is missing") for key in needed if key not in value]
        if not others:
            faults += [((key,) if type(key) is str else (), "is unknown") for key in value if key not in known]
        for key, schema in known.items():
            if key in value:
                faults += [((key, *route), message) for route, message in schema(value[key])]
        return faults[: MOST_FAULTS * 2]

    return check


def anything(depth: int = 32) -> Schema:
    """Plain data of a limited depth: numbers that fit into 64 bits, text, lists, objects."""

    def check(value: Any, left: int = depth) -> Faults:
        if value is None or type(value) in (bool, float):
            return ()
        if type(value) is str:
            return _free_text(value)
        if type(value) is int:
            return _whole(value)
        if type(value) not in (list, dict):
            return _wrong(value, "plain data")
        if not left:
            return [((), f"is nested more than {depth} deep")]
        items = value.items() if type(value) is dict else enumerate(value)
        return _cut(((key, *route), message) for key, part in items for route, message in check(part, left - 1))

    return check


_free_text = text(longest=100_000_000)
_whole = integer()


def _cut(faults: Iterable[tuple[Route, str]]) -> Faults:
    return list(islice(faults, MOST_FAULTS * 2))

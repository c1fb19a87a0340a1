"""Module paths: what lies in what, and the layers of a model. Names of values: what they are called."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import lru_cache


def prefixes(path: str) -> Iterator[str]:
    """ "a", "a.b", "a.b.c" of "a.b.c"."""
    parts = path.split(".") if path else []
    return (".".join(parts[: at + 1]) for at in range(len(parts)))


_NUMBER = re.compile(r"(_\d+)+$")


@lru_cache(maxsize=2**16)
def word_of(value: str) -> str:
    """What a value is called, without the number that tells it from others of that name: "x" of "x_3"."""
    return _NUMBER.sub("", value) or "x"


def is_inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


@lru_cache(maxsize=2**16)
def layer_of(path: str) -> str:
    """The repeated layer that a module or a parameter is in: up to its first number; "" if it is in none."""
    return next((prefix for prefix in prefixes(path) if prefix.rpartition(".")[2].isdigit()), "")


@lru_cache(maxsize=2**16)
def numbered_layer(path: str) -> tuple[str, int] | None:
    """The list that a layer is in, and its number there: ("blocks", 3) of "blocks.3.attn"."""
    outer, _, number = layer_of(path).rpartition(".")
    return (outer, int(number)) if number else None

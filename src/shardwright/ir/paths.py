"""Module paths: what lies in what, and the layers of a model."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache


def prefixes(path: str) -> Iterator[str]:
    """ "a", "a.b", "a.b.c" of "a.b.c"."""
    parts = path.split(".") if path else []
    return (".".join(parts[: at + 1]) for at in range(len(parts)))


def is_inside(path: str, outer: str) -> bool:
    return path == outer or path.startswith(outer + ".")


@lru_cache(maxsize=2**16)
def layer_of(path: str) -> str:
    """The repeated layer that a module or a parameter is in: up to its first number; "" if it is in none."""
    return next((prefix for prefix in prefixes(path) if prefix.rpartition(".")[2].isdigit()), "")

"""What a prologue finds, as text: its names, and how it is reduced over microbatches and ranks."""

from __future__ import annotations

from collections.abc import Iterator

from ..lower import LoweredProgram
from .names import preferred_name


def known_names(program: LoweredProgram) -> dict[str, str]:
    """Where forward reads each value that the prologue found."""
    return {value: f"self.known.{word}" for word, value in _words(program).items()}


def counts(program: LoweredProgram) -> Iterator[str]:
    """How each is reduced, in the order in which the prologue returns them."""
    for word, early in zip(_words(program), program.early, strict=True):
        arguments = [f'name="{word}"']
        arguments += [f'over="{"_".join(early.axes)}"'] if early.axes else []
        arguments += [f'op="{early.how}"'] if early.how != "sum" else []
        yield f"runtime.PrologueCount({', '.join(arguments)})"


def _words(program: LoweredProgram) -> dict[str, str]:
    words: dict[str, str] = {}
    for early in program.early:
        word, number = preferred_name(early.value), 1
        while word in words:
            word, number = f"{preferred_name(early.value)}_{number}", number + 1
        words[word] = early.value
    return words

"""Names for values inside a method: the user's word, bound again once its old meaning is dead."""

from __future__ import annotations

import builtins
import keyword
import re
from collections.abc import Collection, Iterable, Sequence

from ..ir import Op
from ..ir.paths import word_of
from ..lower.program import graph_value
from .grouping import Line

RESERVED = {
    "self",
    "at",
    "F",
    "torch",
    "comm",
    "runtime",
    "shard",
    "local_size",
    "ParameterEntry",
    "Program",
    "R",
    "MESH",
    "GROUPS",
    "PARAMETERS",
    "UNITS",
    *keyword.kwlist,
    *dir(builtins),
}


def preferred_name(value: str) -> str:
    """The word that a value would like to be called; `sum_` where that is a builtin, as PEP 8 has it."""
    word = re.sub(r"\W", "_", word_of(graph_value(value)))
    word = word if word.isidentifier() else f"v_{word}"
    return f"{word}_" if word in RESERVED else word


class Names:
    """Hands out names along a list of lines."""

    def __init__(
        self, lines: Sequence[Line | Op], outputs: Iterable[str], taken: Iterable[str], kept: Collection[str] = ()
    ) -> None:
        """`outputs` are read after the last line, and `kept` right behind the line that makes them."""
        self.taken = RESERVED | set(taken)
        self.last: dict[str, int] = {}
        for at, line in enumerate(lines):
            for name in line.inputs:
                self.last[name] = at
            for name in line.outputs:
                if name in kept:
                    self.last[name] = at
        for name in outputs:
            self.last[name] = len(lines)
        self.bound: dict[str, str] = {}  # word -> the value it stands for now
        self.words: dict[str, str] = {}

    def bind(self, value: str, at: int, keep: Iterable[str] = ()) -> str:
        """A word for a value made by item `at`; words of values that die there may be used again."""
        word, number = preferred_name(value), 1
        kept = set(keep)
        while word in self.taken or word in kept or (word in self.bound and self.last.get(self.bound[word], -1) > at):
            word, number = f"{preferred_name(value)}_{number}", number + 1
        self.bound[word] = value
        self.words[value] = word
        return word

    def bind_all(self, values: Iterable[str]) -> list[str]:
        """Words for what is there before the first item, each another one also where nothing reads it."""
        words: list[str] = []
        for value in values:
            words.append(self.bind(value, -1, words))
        return words

    def use(self, value: str, word: str) -> None:
        self.bound[word] = value
        self.words[value] = word

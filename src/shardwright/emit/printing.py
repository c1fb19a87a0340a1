"""Arguments as text: slots by the names of their values, sizes by their symbols, cuts as code."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from typing import Any

from ..ir import Dtype, Op, Slot
from ..layout import Shard
from ..lower import Size
from .sizes import SizeNames


class Printing:
    """An op with the names of its inputs, ready to be printed.

    It remembers which arguments a printer has read. One that no printer reads would be lost in the text, see `unread`.
    """

    def __init__(self, op: Op, names: Mapping[int, str], sizes: SizeNames, parts: Mapping[str, int]) -> None:
        self.op, self.names, self.sizes, self.parts = op, names, sizes, parts
        self._read: set[str] = set()

    def __getitem__(self, name: str) -> str:
        return self.show(self.literal(name))

    def has(self, name: str) -> bool:
        return self.literal(name) is not None

    def literal(self, name: str, default: Any = None) -> Any:
        self._read.add(name)
        return self.op.argument(name, default)

    def skip(self, *names: str) -> None:
        """These arguments are for the plan, and have no place in the text."""
        self._read.update(names)

    @property
    def unread(self) -> list[str]:
        """The arguments that say something and that the printer has not looked at."""
        return [name for name, value in self.op.arguments if name not in self._read and value is not None]

    def show(self, value: Any) -> str:
        if isinstance(value, Slot):
            return self.names[value.index]
        if isinstance(value, Size):
            return self.sizes.text(value)
        if isinstance(value, Dtype):
            return f"torch.{value}"
        if isinstance(value, Shard):
            return show_shard(value)
        if isinstance(value, tuple):
            inner = ", ".join(self.show(item) for item in value)
            return f"({inner},)" if len(value) == 1 else f"({inner})"
        if isinstance(value, dict):
            return f"{{{', '.join(f'{self.show(name)}: {self.show(item)}' for name, item in value.items())}}}"
        if type(value) is str:
            return json.dumps(value)  # in double quotes, as everything else in the file
        if isinstance(value, float) and value in (float("inf"), float("-inf")):
            return f'float("{value}")'
        if isinstance(value, float) and value != value:
            return 'float("nan")'
        return repr(value)

    def listed(self, name: str) -> str:
        """A list argument without its brackets."""
        value = self.literal(name)
        return ", ".join(self.show(item) for item in value) if isinstance(value, tuple) else self.show(value)

    def options(self, *names: str) -> str:
        """Keyword arguments that were given, each after a comma."""
        return "".join(f", {name}={self[name]}" for name in names if self.has(name))

    def first(self) -> str:
        return self[self.op.arguments[0][0]]

    def many(self, axes: Iterable[str]) -> int:
        """How many devices a group over some axes has."""
        return math.prod(self.parts[axis] for axis in axes)


def show_shard(shard: Shard) -> str:
    """A shard as generated code says it: shard("tp"), shard("tp", 3, 8, 32), shard("tp", (1, 4, 8), (1, 2, 8))."""
    blocks = [f"({b.outer}, {b.size}, {b.inner})" for b in shard.blocks]
    if len(shard.blocks) == 1:
        (block,) = shard.blocks
        blocks = [str(block.outer), str(block.size), str(block.inner)]
    repeat = f", repeat={shard.repeat}" if shard.repeat != 1 else ""
    return f'shard("{shard.axis}", {", ".join(blocks)}{repeat})'


def plain(shard: Shard | None, parts: int) -> bool:
    """Whether a shard is the even contiguous one, which needs no words."""
    return shard is None or (shard.simple(parts) and shard.blocks[0].size == parts)


def axes_text(axes: tuple[str, ...]) -> str:
    return "self." + "_".join(axes)

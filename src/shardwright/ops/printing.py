"""How ops print: arguments as text, and the forms that most calls have.

Slots print by the names of their values, sizes by their symbols, shards as code. A printer is a function of a
`Printing` and returns the right-hand side of the op's line.
"""

from __future__ import annotations

import json
import keyword
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ..ir import Dtype, Op, Slot
from ..layout import Shard

REDUCTIONS = {0: '"none"', 1: '"mean"', 2: '"sum"'}


class Printing:
    """An op with the names of its inputs, ready to be printed.

    It remembers which arguments a printer has read. One that no printer reads would be lost in the text, see `unread`.
    """

    def __init__(
        self, op: Op, names: Mapping[int, str], size: Callable[[Any], str | None], parts: Mapping[str, int]
    ) -> None:
        """`size` gives the text of a local size, and None for anything else."""
        self.op, self.names, self.size, self.parts = op, names, size, parts
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
        size = self.size(value)
        if size is not None:
            return size
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


def show_shard(shard: Shard, inner: Sequence[str] | None = None) -> str:
    """A shard as generated code says it: shard("tp"), shard("tp", 3, 8, 32), shard("tp", (1, 4, 8), (1, 2, 8)).

    `inner` are names for the last number of each block.
    """
    last = inner or [str(block.inner) for block in shard.blocks]
    blocks = [f"({block.outer}, {block.size}, {text})" for block, text in zip(shard.blocks, last, strict=True)]
    if len(shard.blocks) == 1:
        blocks = [blocks[0].strip("()")]
    repeat = f", repeat={shard.repeat}" if shard.repeat != 1 else ""
    return f'shard("{shard.axis}", {", ".join(blocks)}{repeat})'


def plain(shard: Shard | None, parts: int) -> bool:
    """Whether a shard is the even contiguous one, which needs no words."""
    return shard is None or (shard.simple(parts) and shard.blocks[0].size == parts)


def axes_text(axes: tuple[str, ...]) -> str:
    return "self." + "_".join(axes)


Printer = Callable[[Printing], str]


def bracketed(text: str) -> str:
    return f"({text})" if " " in text and not text.endswith(")") else text


def fallback(p: Printing) -> str:
    """As the op of torch that it is, with all its arguments."""
    shown = [p.first()] if p.op.arguments else []
    shown += [_named(name, p[name]) for name, _ in p.op.arguments[1:]]
    return f"torch.ops.{p.op.target}({', '.join(shown)})"


def _named(name: str, text: str) -> str:
    """An argument by name; torch has some called `from`."""
    return f'**{{"{name}": {text}}}' if keyword.iskeyword(name) else f"{name}={text}"


def _base(p: Printing) -> str:
    return p.op.target.split(".")[1]


def operator(sign: str) -> Printer:
    """`x + y`."""

    def show(p: Printing) -> str:
        left = p.first()
        right = p["other"] if p.has("other") else p["exponent"] if p.has("exponent") else p["mat2"]
        alpha = p.literal("alpha", 1)
        return f"{left} {sign} {right}" if alpha == 1 else f"{left} {sign} {alpha} * {right}"

    return show


def method(p: Printing) -> str:
    """`x.cos()`, of an op that has no other arguments."""
    return f"{bracketed(p.first())}.{_base(p)}()" if len(p.op.arguments) == 1 else fallback(p)


def function(p: Printing) -> str:
    """`torch.flip(x, dims=(0,))`, which torch has under the same name with the same arguments."""
    if not p.op.arguments:
        return fallback(p)
    shown = [p.first(), *(f"{key}={p[key]}" for key, _ in p.op.arguments[1:])]
    return f"torch.{_base(p)}({', '.join(shown)})"


def functional(name: str, *keys: str, options: tuple[str, ...] = ()) -> Printer:
    """`F.gelu(x, approximate="tanh")`."""

    def show(p: Printing) -> str:
        shown = [p[key] for key in keys if p.has(key)]
        return f"F.{name}({', '.join(shown)}{p.options(*options)})"

    return show


def dims_method(name: str, *keys: str) -> Printer:
    """`x.transpose(1, 2)`."""

    def show(p: Printing) -> str:
        shown = [p.listed(key) or "()" for key in keys if p.has(key)]
        return f"{p.first()}.{name}({', '.join(shown)})"

    return show


def listed_call(name: str) -> Printer:
    """`torch.cat([x, y], 1)`."""

    def show(p: Printing) -> str:
        return f"torch.{name}([{p.listed('tensors')}], {p.literal('dim', 0)})"

    return show

"""Which rule belongs to which op: one table, filled from the definitions of ops (`ops/`) and by users."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from string import ascii_lowercase

from ..ir import Op, Value
from .notation import Rule, parse


class Declined(Exception):
    """A rule has nothing to say about a call of these shapes; the op is then probed, or runs replicated."""


@dataclass(frozen=True, slots=True)
class OpCall:
    """An op with the values it reads and makes: what a rule may look at."""

    op: Op
    inputs: tuple[Value, ...]
    outputs: tuple[Value, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the first input."""
        return self.inputs[0].shape

    def tensor(self, name: str) -> Value | None:
        """The value given for an argument, or None."""
        slot = self.op.tensor(name)
        return next((value for value in self.inputs if value.name == slot), None) if slot else None

    def dim(self, name: str = "dim", default: int = 0, rank: int | None = None) -> int:
        """A dim argument, counted from the front."""
        value: int = self.op.argument(name, default)
        rank = len(self.shape) if rank is None else rank
        if not rank:
            raise Declined(f"{self.op} names a dim of a tensor that has none")
        return value % rank

    def dims(self, name: str = "dim", rank: int | None = None) -> tuple[int, ...]:
        """A list of dims, counted from the front; all of them where none is given."""
        rank = len(self.shape) if rank is None else rank
        value = self.op.argument(name)
        if value is None or value == ():
            return tuple(range(rank))
        return tuple(dim % max(rank, 1) for dim in (value if isinstance(value, tuple) else (value,)))


RuleFunction = Callable[[OpCall], "Rule | str | None"]

_TABLE: dict[str, RuleFunction] = {}
KEYED: set[str] = set()
"""Ops whose random masks are drawn by the position of an element in the full tensor."""


def register(target: str, rule: RuleFunction) -> None:
    """Set or replace the rule of an op."""
    _TABLE[target] = rule


def has_rule(target: str) -> bool:
    """Whether there is a rule for some calls of an op."""
    return target in _TABLE


def find_rule(call: OpCall) -> Rule | None:
    """The rule for a call, or None if the op has none (it then runs replicated)."""
    function = _TABLE.get(call.op.target)
    try:
        rule = function(call) if function is not None else None
    except Declined:
        return None
    return parse(rule) if isinstance(rule, str) else rule


def known_targets() -> frozenset[str]:
    return frozenset(_TABLE)


def letters(count: int, prefix: str = "") -> list[str]:
    """Labels for dims that have no better name."""
    return [prefix + (ascii_lowercase[index] if index < 26 else f"x{index}") for index in range(count)]

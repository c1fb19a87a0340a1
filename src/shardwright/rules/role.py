"""What an op may do on an axis: split on a role, or run whole and pass sums on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layout import Placement, fills_every_chunk

FAN = "fan"
"""The choice of an op that runs whole and hands gradients back in parts."""

ROWS = "partial:"
"""Prefix of the choice that lets a partial sum through a group of linear inputs ("partial:1")."""

STRIPED = "striped:"
"""Prefix of a role whose triangular atoms are sharded in stripes: rank r of n has the places r, r + n, r + 2n, ..."""

Choices = Mapping[str, Mapping[str, str]]
"""For each op, on which axis it is split on which role."""

Picked = tuple[tuple[str, int, str], ...]
"""The axes of a choice: name, size, role."""

Place = Placement | tuple[int, int, bool]
"""What a role does to a tensor: it shards a dim at an atom, in stripes or not, or gives it a state on the axis."""


def without_stripes(choice: str) -> str:
    """A choice, whether its shards are striped or contiguous."""
    return choice.removeprefix(STRIPED)


@dataclass(frozen=True, slots=True)
class Role:
    """One way to split an op: a label, and the atom of it that an axis takes."""

    name: str
    label: str
    atom: int
    size: int
    striped: bool = False

    def fills(self, parts: int) -> bool:
        """Whether every part gets something: not every kernel can work on nothing."""
        return fills_every_chunk(self.size, parts)

"""Tables of what a report says many times (names, layouts), so that its rows hold numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from ...layout import MB, Layout, Partial


class Interned:
    """A list without duplicates, and the number of each item."""

    def __init__(self) -> None:
        self.items: list[Any] = []
        self._numbers: dict[Any, int] = {}

    def number(self, item: Any, shown: Any = None) -> int:
        """The number of an item, which stands in the list as `shown` (default: as it is)."""
        if item not in self._numbers:
            self._numbers[item] = len(self.items)
            self.items.append(item if shown is None else shown)
        return self._numbers[item]


class LayoutTable(Interned):
    """Layouts on devices: the axes that shard each dim, and on which others there is a pending sum."""

    def layout(self, layout: Layout) -> int:
        dims = tuple(tuple(shard.axis for shard in shards if shard.axis != MB) for shards in layout.shards)
        rest = tuple(
            (axis, "P" if isinstance(placement, Partial) else "R") for axis, placement in layout.rest if axis != MB
        )
        return self.number((dims, rest), {"dims": [list(dim) for dim in dims], "rest": [list(item) for item in rest]})


def short(value: float) -> float:
    """A number in four digits, as plan files and reports write it."""
    rounded = float(f"{value:.4g}") if math.isfinite(value) else 0.0
    return int(rounded) if rounded.is_integer() and abs(rounded) < 2**53 else rounded


def shorts(values: Sequence[float]) -> list[float]:
    return [short(value) for value in values]

"""A value by size, known at some sizes and drawn straight between them on log-log paper."""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass
from itertools import pairwise

from ..errors import ClusterError


@dataclass(frozen=True, slots=True)
class Curve:
    """Points (size, value), sizes growing. Beyond its ends a curve is flat: the reader decides what that means."""

    points: tuple[tuple[float, float], ...]

    def __post_init__(self) -> None:
        if not self.points:
            raise ClusterError("a curve needs at least one point (size, value)")
        sizes = [size for size, _ in self.points]
        if any(b <= a for a, b in pairwise(sizes)):
            raise ClusterError(f"the sizes of a curve must grow: {', '.join(f'{size:g}' for size in sizes)}")
        for size, value in self.points:
            if not (0 < size < math.inf and 0 < value < math.inf):
                raise ClusterError(f"the point ({size:g}, {value:g}) of a curve must be positive")

    @property
    def first(self) -> float:
        return self.points[0][0]

    @property
    def last(self) -> float:
        return self.points[-1][0]

    def at(self, size: float) -> float:
        """The value at a size."""
        place = bisect_left(self.points, (size, 0.0))
        if place == 0:
            return self.points[0][1]
        if place == len(self.points):
            return self.points[-1][1]
        (a, low), (b, high) = self.points[place - 1], self.points[place]
        if size == b:
            return high
        part = math.log(size / a) / math.log(b / a)
        return low * math.exp(part * math.log(high / low))


def ramp(best: float, half: float) -> Curve:
    """A fraction that grows with size to `best`, and is half of it at the size `half`: a start-up time, as a curve."""
    sizes = [float(f"{half * 10.0 ** (step / 2):.3g}") for step in range(-4, 7)]
    return Curve(tuple((size, float(f"{best * size / (size + half):.4g}")) for size in sizes))

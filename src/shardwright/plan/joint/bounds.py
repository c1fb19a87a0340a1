"""How long a pipeline takes at least, before anything of it is made, and again when some of it is.

All seats of one kind share a `Load`: what a step takes there if every block is on one seat, for each price that memory
may have. In t seconds and r bytes a seat can do no more than a part

    w(t) = min over prices p of (t + p r) / (least of seconds + p bytes)        Load.part
    step >= the least t for which the parts of all seats come to 1              together

From a schedule comes what a microbatch waits for at its start and its end: a part of the other stages' time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

SCHEDULES = {
    "1f1b": 1.0, "zb": 1 / 3, "interleaved": 1 / 2, "interleaved:3": 1 / 3, "interleaved:4": 1 / 4, "zbv": 1 / 6
}  # fmt: skip
"""The schedules that are looked at, and how much of the other stages' time a microbatch waits for, at best."""

HALVINGS = 40
"""Of the interval in which the time of seats of several kinds is looked for."""


@dataclass(frozen=True, slots=True)
class LeastCosts:
    """What all blocks take on one seat: for some prices of memory, the first 0, the least of seconds + price * bytes.

    bytes    that they need in any case
    """

    prices: Floats
    least: Floats
    bytes: float = 0.0


class RankLoad(NamedTuple):
    """What all blocks take on one of `seats` that are alike.

    whole     for each price the least of seconds + price * bytes
    relief    price * the bytes that a seat has
    most      the part that a seat has the memory for at all
    """

    pp_ranks: int
    whole: Floats
    relief: Floats
    most: float

    def part(self, seconds: float) -> float:
        """The part of all blocks that one seat can do in so many seconds, at most."""
        return min(self.most, float(((seconds + self.relief) / self.whole).min()))


def load_of(pp_ranks: int, priced: LeastCosts, room: float) -> RankLoad:
    """A load from what is least at some prices; `room`: bytes of a seat."""
    most = math.inf if priced.bytes <= 0 else room / priced.bytes
    if math.isinf(room):  # then only a price of nothing, which is the first, says something
        return RankLoad(pp_ranks, priced.least[:1], np.zeros(1), most)
    return RankLoad(pp_ranks, priced.least, priced.prices * room, most)


def least_seconds(loads: Sequence[RankLoad]) -> float:
    """Seconds in which seats do all that there is between them, at least; infinity if it does not fit."""
    if sum(load.pp_ranks * load.most for load in loads) < 1.0:
        return math.inf
    if len(loads) == 1:
        (load,) = loads
        return float((load.whole / load.pp_ranks - load.relief).max())
    low, high = 0.0, max(float(load.whole.max()) for load in loads)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(load.pp_ranks * load.part(middle) for load in loads) < 1.0:
            low = middle
        else:
            high = middle
    return low


def fill_of(schedule: str) -> float:
    """How much of the other stages' time a microbatch waits for, at best."""
    return SCHEDULES.get(schedule, 1.0)


def bound_of(alone: Sequence[float], microbatches: int, schedule: str, after: Sequence[float] = ()) -> float:
    """Seconds of a step at least, from those that a microbatch takes on each seat alone, whatever the memory.

    All seats are busy with their shares; and a part of one microbatch passes from seat to seat while others wait.
    `after`: what comes on top once a step, for each seat as if it had all of it.
    """
    if math.inf in alone:
        return math.inf
    whole = [microbatches * each + more for each, more in zip(alone, after or [0.0] * len(alone), strict=True)]
    return _shared(whole) + idle_seconds(alone, fill_of(schedule))


def idle_seconds(alone: Sequence[float], fill: float) -> float:
    """Seconds that a seat has nothing to do, at least, from those that a microbatch takes on each seat alone."""
    return fill * (min(alone) - _shared(alone))


def _shared(alone: Sequence[float]) -> float:
    """Seconds that seats take together for what each would take alone; none where there is nothing to do."""
    return 1.0 / sum(1.0 / each for each in alone) if all(alone) else 0.0

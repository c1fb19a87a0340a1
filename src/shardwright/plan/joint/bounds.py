"""Lower bounds on the step time of a pipeline, before any of it is solved and after some of it is.

All pipeline ranks of one kind share a `RankLoad`: the cost of a step if one rank ran every block, at several prices
of memory. In t seconds and r bytes a rank can do at most the fraction

    w(t) = min over prices p of (t + p r) / (least of seconds + p bytes)        RankLoad.part
    step >= the least t for which the fractions of all ranks sum to 1           least_seconds

A schedule adds what a microbatch waits for while the pipeline fills and drains: a fraction of the other stages' time.
`ParameterBounds` is the least that parameters cost, whatever the ops do: the part of bounds that needs no tables.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...cost.resources import COUNT, phases, row
from ..problem_structure import ProblemStructure
from ..storage_options import StorageOptions

Floats = NDArray[np.float64]

HALVINGS = 40
"""Bisection steps for the time of pipeline ranks of several kinds."""


@dataclass(frozen=True, slots=True)
class LeastCosts:
    """The cost of all blocks on one pipeline rank: at some prices of memory (the first is 0), the least of
    seconds + price * bytes.

    bytes    needed in any case
    """

    prices: Floats
    least: Floats
    bytes: float = 0.0


class RankLoad(NamedTuple):
    """The cost of all blocks on one of `pp_ranks` identical pipeline ranks.

    least     for each price the least of seconds + price * bytes
    relief    price * the bytes that a rank has
    most      the largest fraction of the blocks that fits a rank's memory at all
    """

    pp_ranks: int
    least: Floats
    relief: Floats
    most: float

    def part(self, seconds: float) -> float:
        """The largest fraction of all blocks that one rank can do in so many seconds."""
        return min(self.most, float(((seconds + self.relief) / self.least).min()))


def load_of(pp_ranks: int, priced: LeastCosts, memory_limit: float) -> RankLoad:
    """A load from the least costs at some prices; `memory_limit`: bytes of a pipeline rank."""
    most = math.inf if priced.bytes <= 0 else memory_limit / priced.bytes
    if math.isinf(memory_limit):  # with unlimited memory only the first price, 0, bounds anything
        return RankLoad(pp_ranks, priced.least[:1], np.zeros(1), most)
    return RankLoad(pp_ranks, priced.least, priced.prices * memory_limit, most)


def least_seconds(loads: Sequence[RankLoad]) -> float:
    """The least seconds in which all ranks together do all blocks; infinity if they don't fit."""
    if sum(load.pp_ranks * load.most for load in loads) < 1.0:
        return math.inf
    if len(loads) == 1:
        (load,) = loads
        return float((load.least / load.pp_ranks - load.relief).max())
    low, high = 0.0, max(float(load.least.max()) for load in loads)
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        if sum(load.pp_ranks * load.part(middle) for load in loads) < 1.0:
            low = middle
        else:
            high = middle
    return low


def bound_of(alone: Sequence[float], microbatches: int, fill: float, after: Sequence[float] = ()) -> float:
    """A lower bound on the step time, from the seconds of a microbatch if each rank ran all blocks, ignoring memory.

    All ranks are busy with their shares, and part of one microbatch (`fill`) passes from rank to rank
    while others wait.
    `after`: what is added once a step, for each rank as if it had all of it.
    """
    if math.inf in alone:
        return math.inf
    totals = [microbatches * each + more for each, more in zip(alone, after or [0.0] * len(alone), strict=True)]
    return _shared(totals) + idle_seconds(alone, fill)


def idle_seconds(alone: Sequence[float], fill: float) -> float:
    """The least seconds that a rank is idle, from the seconds of a microbatch if each rank ran all blocks."""
    least = min(alone)
    return fill * (least - _shared(alone)) if math.isfinite(least) else math.inf


def _shared(alone: Sequence[float]) -> float:
    """Seconds that ranks take together for what each would take alone; 0 if there is nothing to do."""
    if not all(alone):
        return 0.0
    rate = sum(1.0 / each for each in alone)
    return 1.0 / rate if rate else math.inf


SECONDS = row(compute_backward=1.0, beside_forward=1.0, beside_backward=1.0, update=1.0)
"""The resources that make up the time of parameters."""


class ParameterBounds:
    """The least that all parameters of a graph cost on a pipeline rank, each in its own best storage."""

    def __init__(self, skeleton: ProblemStructure, storage_options: Sequence[StorageOptions], overlap: float) -> None:
        many = Counter(skeleton.variables[at].kind for at in skeleton.storage_options.values())
        priced = [(options.used, many[kind]) for kind, options in enumerate(storage_options) if len(options.used)]
        self.overlap, self.counts = overlap, np.array([count for _, count in priced], dtype=float)
        self.used = np.concatenate([np.zeros((0, COUNT)), *(used for used, _ in priced)])
        self._fast: dict[int, float] = {}
        self.starts = np.cumsum([0, *(len(used) for used, _ in priced)])[:-1]

    def least_at(self, prices: np.ndarray, microbatches: int) -> np.ndarray:
        """At each price of memory the least of seconds of a step + price * bytes stored.

        Seconds are those of accumulating gradients, of overlapped communication as far as it is always exposed, and of
        the update.
        """
        time = np.sum([forms[0] for forms in phases(self.overlap, microbatches)], axis=0) * SECONDS
        return self._least(time[:, None] + prices * row(stored=1.0)[:, None])

    def _least(self, weights: np.ndarray) -> np.ndarray:
        if not len(self.used):
            return np.zeros(weights.shape[1])
        least: np.ndarray = self.counts @ np.minimum.reduceat(self.used @ weights, self.starts)
        return least

    def most(self, weights: np.ndarray) -> float:
        """What all of them cost, each in its most expensive storage."""
        if not len(self.used):
            return 0.0
        return float(self.counts @ np.maximum.reduceat(self.used @ weights, self.starts))

    def fast_stored(self, microbatches: int) -> float:
        """Bytes per device if every parameter is in its fastest storage."""
        if microbatches not in self._fast:
            cheap = 1e-9 / max(self.stored, 1.0)  # seconds for all bytes: breaks ties in favour of the leaner storage
            both = self.least_at(np.array([0.0, cheap]), microbatches)
            self._fast[microbatches] = float(both[1] - both[0]) / cheap
        return self._fast[microbatches]

    @cached_property
    def stored(self) -> float:
        """The least bytes per device."""
        return float(self._least(row(stored=1.0)[:, None])[0])

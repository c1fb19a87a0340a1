"""Where to cut a graph into stages, so that the pipeline is fastest.

stages      stage s, from bound i to bound i + 1 + w, takes stages[s][i, w] for a microbatch (infinity: never)
entering    what is added where stage s begins at bound i, entering[s][i]: values that cross to it
time        rounds * (the slowest stage) + fill * (the sum of all stages and of what enters)      StageCuts.seconds

For a cap on the slowest stage, dynamic programming from the end gives the least sum (`_least_sum`). The lowest
feasible cap comes first (`_lowest_cap`); higher ones are tried while they save more of the sum than they cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

MOST_CAPS = 24
"""Caps on the slowest stage that are tried; if there are more, they are sampled evenly."""


class StageCuts(NamedTuple):
    """Bounds of the stages (the first 0, the last the number of blocks), and what they cost."""

    bounds: tuple[int, ...]
    slowest: float
    total: float  # the sum of all stages and of what enters
    seconds: float


def cut_into_stages(
    stages: Sequence[Floats], entering: Sequence[Floats], rounds: float, fill: float = 1.0
) -> StageCuts | None:
    """The best cuts, or None if there are none."""
    ends = _ends(stages[0])
    low = _lowest_cap(stages, ends)
    if math.isinf(low):
        return None
    free = _least_sum(stages, ends, entering, math.inf)
    best = _score(stages, free, entering, rounds, fill)
    if best.slowest > low and rounds:
        first = _score(stages, _least_sum(stages, ends, entering, low), entering, rounds, fill)
        gain = fill * max(0.0, first.total - best.total) / rounds
        best = min(best, first, key=lambda cuts: cuts.seconds)
        for cap in _caps(stages, low, low + gain):
            cuts = _score(stages, _least_sum(stages, ends, entering, cap), entering, rounds, fill)
            best = min(best, cuts, key=lambda cuts: cuts.seconds)
    return best


def _ends(stage: Floats) -> NDArray[np.intp]:
    """For each cell of a stage its last bound; a stage past the last block ends one further."""
    starts, widths = stage.shape
    ends: NDArray[np.intp] = np.minimum(np.arange(starts)[:, None] + 1 + np.arange(widths)[None, :], starts + 1)
    return ends


def _lowest_cap(stages: Sequence[Floats], ends: NDArray[np.intp]) -> float:
    after = _at_the_end(len(stages[0]))
    for stage in reversed(stages):
        after = _padded(np.maximum(stage, after[ends]).min(axis=1))
    return float(after[0])


def _at_the_end(starts: int) -> Floats:
    least = np.full(starts + 2, np.inf)
    least[starts] = 0.0
    return least


def _padded(values: Floats) -> Floats:
    """Infinity for the end of the last block, where no stage begins, and for beyond."""
    return np.append(values, (np.inf, np.inf))


def _least_sum(
    stages: Sequence[Floats], ends: NDArray[np.intp], entering: Sequence[Floats], cap: float
) -> tuple[int, ...]:
    """The bounds with the least sum, with no stage slower than the cap."""
    after = _at_the_end(len(stages[0]))
    picks: list[NDArray[np.intp]] = []
    for number in range(len(stages) - 1, -1, -1):
        sums = np.where(stages[number] <= cap, stages[number], np.inf) + after[ends]
        pick = sums.argmin(axis=1)
        least = sums[np.arange(len(sums)), pick]
        after = _padded(least + entering[number][: len(sums)] if number else least)
        picks.append(pick)
    bounds = [0]
    for pick in reversed(picks):
        bounds.append(bounds[-1] + 1 + int(pick[bounds[-1]]))
    return tuple(bounds)


def _score(
    stages: Sequence[Floats], bounds: tuple[int, ...], entering: Sequence[Floats], rounds: float, fill: float
) -> StageCuts:
    pairs = zip(stages, bounds, bounds[1:], strict=False)
    each = [float(stage[begin, end - begin - 1]) for stage, begin, end in pairs]
    total = sum(each) + float(sum(more[begin] for more, begin in zip(entering[1:], bounds[1:-1], strict=True)))
    return StageCuts(bounds, max(each), total, rounds * max(each) + fill * total)


def _caps(stages: Sequence[Floats], low: float, high: float) -> list[float]:
    distinct = {id(stage): stage for stage in stages}.values()
    values = np.unique(np.concatenate([stage[(stage > low) & (stage <= high)] for stage in distinct]))
    if len(values) > MOST_CAPS:
        values = values[np.linspace(0, len(values) - 1, MOST_CAPS).astype(int)]
    caps: list[float] = values.tolist()
    return caps

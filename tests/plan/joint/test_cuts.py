"""Cuts of a line are the best there are: the same as all of them tried."""

import math
from itertools import combinations

import numpy as np
import pytest

from shardwright.plan.joint.stage_cuts import cut_into_stages


def tables(weights: list[float], stages: int, speed: list[float] | None = None) -> list[np.ndarray]:
    """Stage s over a run of blocks takes their sum over its speed."""
    count = len(weights)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    first = np.arange(count)[:, None]
    last = np.minimum(first + 1 + np.arange(count)[None, :], count)
    beyond = first + 1 + np.arange(count)[None, :] > count
    runs = np.where(beyond, np.inf, before[last] - before[first])
    return [runs / (speed[stage] if speed else 1.0) for stage in range(stages)]


def brute_force(stages: list[np.ndarray], entering: np.ndarray, rounds: float, fill: float) -> float:
    count, best = len(stages[0]), math.inf
    for cuts in combinations(range(1, count), len(stages) - 1):
        bounds = (0, *cuts, count)
        each = [stage[a, b - a - 1] for stage, a, b in zip(stages, bounds[:-1], bounds[1:], strict=True)]
        if max(each) < math.inf:
            best = min(best, rounds * max(each) + fill * (sum(each) + sum(entering[list(cuts)])))
    return best


@pytest.mark.parametrize("seed", range(40))
def test_the_best_of_all_cuts_is_found(seed):
    rng = np.random.default_rng(seed)
    count, number = int(rng.integers(3, 10)), int(rng.integers(1, 4))
    speed = rng.uniform(0.5, 2.0, number).tolist()
    stages = tables(rng.uniform(0.1, 1.0, count).tolist(), number, speed)
    for stage in stages:  # some runs do not fit the memory
        stage[rng.uniform(size=stage.shape) < 0.15] = np.inf
    entering = rng.uniform(0.0, 0.5, count + 1)
    rounds, fill = float(rng.integers(0, 9)), float(rng.choice([1.0, 0.5]))
    wanted, best = (
        brute_force(stages, entering, rounds, fill),
        cut_into_stages(stages, [entering] * number, rounds, fill),
    )
    if math.isinf(wanted):
        assert best is None
    else:
        assert best is not None and best.seconds == pytest.approx(wanted)


def test_equal_blocks_are_cut_evenly():
    best = cut_into_stages(tables([1.0] * 12, 4), [np.zeros(13)] * 4, 8.0)
    assert best.bounds == (0, 3, 6, 9, 12)


def test_a_faster_stage_gets_more():
    best = cut_into_stages(tables([1.0] * 12, 2, [1.0, 3.0]), [np.zeros(13)] * 2, 8.0)
    assert best.bounds == (0, 3, 12)


def test_cuts_are_where_little_crosses():
    entering = np.array([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 0.0])
    best = cut_into_stages(tables([1.0] * 6, 2), [entering] * 2, 0.0)
    assert best.bounds == (0, 3, 6)


def test_more_stages_than_blocks_have_no_cuts():
    assert cut_into_stages(tables([1.0] * 3, 4), [np.zeros(4)] * 4, 1.0) is None

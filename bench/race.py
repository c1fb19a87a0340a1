"""Times contenders against each other in the same processes, interleaved.

        round 1   A B C        every cell: barrier, a few steps, barrier
        round 2   A C B        the order rotates, and every other round runs backwards,
        round 3   C A B        so that no contender always follows the same one
        ...

A machine's speed drifts by a quarter within minutes. The ratio of two contenders within a round hardly
does, so the result is the median of the rounds' ratios, and its spread their interquartile range.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, quantiles

import torch
import torch.distributed as dist
from torch import Tensor

from .peers import Contender, eager
from .workload import Workload

Times = dict[str, list[float]]  # contender -> seconds a step, one per round


@dataclass(frozen=True, kw_only=True)
class Ratio:
    value: float
    spread: float


def order(names: Sequence[str], number: int) -> list[str]:
    shift = (number // 2) % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


def check_agreement(contenders: Mapping[str, Contender], work: Workload, *, steps: int = 3) -> None:
    """Before anything is timed: every contender that is whole has the losses of one device: it does the same work."""
    batches = work.batches(steps)
    reference = eager(work)
    expected = [reference.step(*batch).item() for batch in batches]
    for name, contender in contenders.items():
        if not contender.is_whole:
            continue
        losses = [whole_loss(contender, contender.step(*batch)) for batch in batches]
        torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0, msg=lambda text, name=name: f"{name}: {text}")


def whole_loss(contender: Contender, loss: Tensor) -> float:
    if contender.loss_is_share:
        loss = loss.clone()
        dist.all_reduce(loss)
        loss /= dist.get_world_size()
    return loss.item()


def race(
    contenders: Mapping[str, Contender],
    work: Workload,
    *,
    rounds: int,
    steps: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[], None] = lambda: None,
) -> Times:
    batches = work.batches(steps)
    times: Times = {name: [] for name in contenders}
    for number in range(-1, rounds):  # round -1 warms up
        for name in order(list(contenders), number):
            dist.barrier()
            start = clock()
            for batch in batches:
                contenders[name].step(*batch)
            dist.barrier()
            if number >= 0:
                times[name].append((clock() - start) / steps)
        progress()
    return times


def ratio_of(times: Times, above: str, below: str) -> Ratio:
    """How many times longer `above` takes than `below`."""
    ratios = [a / b for a, b in zip(times[above], times[below], strict=True)]
    return Ratio(value=median(ratios), spread=spread_of(ratios))


def ratio_of_minima(times: Times, above: str, below: str) -> Ratio:
    """For small differences in CPU time: noise only ever adds, so the minima are nearest the truth."""
    value = min(times[above]) / min(times[below])
    return Ratio(value=value, spread=ratio_of(times, above, below).spread)


def spread_of(values: Sequence[float]) -> float:
    if len(values) < 2:
        return 0.0
    low, _, high = quantiles(values, n=4)
    return high - low

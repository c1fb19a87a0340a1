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

from .peers import Contender, training_step
from .workload import Workload

Times = dict[str, list[float]]  # contender -> seconds a step, one per round


@dataclass(frozen=True, kw_only=True)
class Lap:
    """Seconds a step of one contender in one round."""

    wall: float
    cpu: float  # user and system time of this rank


@dataclass(frozen=True, kw_only=True)
class Ratio:
    value: float
    spread: float


def order(names: Sequence[str], number: int) -> list[str]:
    shift = (number // 2) % len(names)
    turned = [*names[shift:], *names[:shift]]
    return turned[::-1] if number % 2 else turned


def check_agreement(contenders: Mapping[str, Contender], work: Workload, *, steps: int = 3, taken: int = 0) -> None:
    """Before anything is timed: every contender that is whole has the losses of one device: it does the same work.

    taken   how many steps on the first batch the contenders have behind them
    """
    batches = work.batches(steps)
    reference = training_step(work.model(), rows=False)
    for _ in range(taken):
        reference(*work.batches(1)[0])
    expected = [reference(*batch).item() for batch in batches]
    for name, contender in contenders.items():
        if contender.alone or not contender.is_whole:
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
    cpu_time: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> Times:
    laps = run_laps(contenders, work, rounds=rounds, steps=steps, progress=progress)
    return {name: [lap.cpu if cpu_time else lap.wall for lap in each] for name, each in laps.items()}


def run_laps(
    contenders: Mapping[str, Contender],
    work: Workload,
    *,
    rounds: int,
    steps: int,
    progress: Callable[[], None] = lambda: None,
) -> dict[str, list[Lap]]:
    batches = work.batches(steps)
    laps: dict[str, list[Lap]] = {name: [] for name in contenders}
    for number in range(-1, rounds):  # round -1 warms up
        for name in order(list(contenders), number):
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            for batch in batches:
                contenders[name].step(*batch)
            cpu = time.process_time() - busy
            dist.barrier()
            if number >= 0:
                laps[name].append(Lap(wall=(time.perf_counter() - start) / steps, cpu=cpu / steps))
        progress()
    return laps


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

"""How long a call takes on a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from ..runtime import accelerator

BATCHES = 15  # short ones: on a busy machine a long one is sure to be interrupted


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much time to spend. Sizes grow until a call takes longer than `longest`, or `largest` bytes are reached."""

    each: float  # seconds for one number
    longest: float  # seconds of one call after which no larger size is tried
    largest: int  # bytes of one operand or message
    factor: int  # from one message to the next
    dtypes: tuple[torch.dtype, ...]


BRIEF = Effort(each=0.006, longest=0.03, largest=2**24, factor=16, dtypes=(torch.float32,))
QUICK = Effort(each=0.03, longest=0.05, largest=2**24, factor=16, dtypes=(torch.float32, torch.bfloat16))
FULL = Effort(
    each=0.3, longest=1.0, largest=2**28, factor=4, dtypes=(torch.float32, torch.bfloat16, torch.float16, torch.float64)
)


def once(run: Callable[[], object], device: torch.device, count: int = 1, alone: bool = False) -> float:
    """Seconds for one of `count` calls in a row.

    `alone`: the calls wait for no other rank. Then a thread of a CPU takes what the processor spent on it, if that is
    less than what passed: on a quiet machine they are the same, and on a busy one others had the core meanwhile.
    """

    def repeat() -> None:
        for _ in range(count):
            run()

    if device.type != "cpu":
        return accelerator.seconds_on(device, repeat) / count
    begin, spent = time.perf_counter(), time.thread_time()
    repeat()
    passed, spent = time.perf_counter() - begin, time.thread_time() - spent
    return (min(passed, spent) if alone and torch.get_num_threads() == 1 else passed) / count


def seconds(
    run: Callable[[], object],
    device: torch.device,
    effort: Effort,
    agree: Callable[[float], float] | None = None,
    crowded: bool = False,
) -> float:
    """The time of one call: the least of some batches, since what else runs on the machine only adds.

    `agree` makes of the times of all ranks the one that counts, for a call in which they wait for each other.
    `crowded`: what else runs are the other ranks, on the same cores, as they will in training; then it is the usual
    time.
    """
    alone = agree is None and not crowded

    def timed(count: int) -> float:
        passed = once(run, device, count, alone)
        return passed if agree is None else agree(passed)

    run()
    run()  # the second still finds caches and connections cold
    first = timed(1)
    calls = int(effort.each / max(first, 1e-7))
    count = max(1, min(1000, calls // BATCHES))
    times = [timed(count) for _ in range(max(2, min(BATCHES, calls)))]
    return median(times) if crowded else min(times)

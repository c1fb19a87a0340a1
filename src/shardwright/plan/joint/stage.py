"""A stage: a run of blocks on a pipeline rank, and the solution, or the mix of two, that fits its memory.

memory     stored + microbatches in flight * saved for backward by each + transient memory (`reserve`)
time       forward + backward of a microbatch + its share of what is done once a step
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ...cost.resources import Resource
from .front import QUEUED, WEIGHT, StageFront, StageSolution


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCost:
    """The cost of a run of blocks on a device: seconds of a microbatch, seconds once a step, and bytes.

    forward, backward    of a microbatch; backward includes `weight`
    weight               the part of backward that computes weight gradients
    waited               exposed communication inside the stage in a microbatch
    once                 gradient sync and the update
    stored               bytes that are there all the time
    saved                bytes that a microbatch saves for backward
    queued               bytes that it holds on to after that until its weight gradients are computed
    """

    forward: float
    backward: float
    weight: float
    waited: float
    once: float
    stored: float
    saved: float
    queued: float

    def memory(self, flight: float) -> float:
        return self.stored + flight * self.saved


def seconds_of(used: np.ndarray, overlap: float) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of a microbatch for rows of resources (see `cost.resources`)."""
    rest, seconds = 1.0 - overlap, []
    for kind in ("FORWARD", "BACKWARD"):
        kernels, send, overlapped = (used[..., Resource[f"{part}_{kind}"]] for part in ("COMPUTE", "SEND", "BESIDE"))
        seconds.append(send + np.maximum(kernels + rest * overlapped, overlapped + rest * kernels))
    return seconds[0], seconds[1]


def stage_of(used: np.ndarray, overlap: float) -> StageCost:
    """A stage from the columns that it uses."""
    forward, backward = seconds_of(used, overlap)
    kernels = used[Resource.COMPUTE_FORWARD] + used[Resource.COMPUTE_BACKWARD]
    return StageCost(
        forward=float(forward),
        backward=float(backward),
        weight=float(min(used[WEIGHT], backward)),
        waited=float(max(0.0, forward + backward - kernels)),
        once=float(used[Resource.UPDATE]),
        stored=float(used[Resource.STORED]),
        saved=float(used[Resource.KEPT]),
        queued=float(min(used[QUEUED], used[Resource.KEPT])),
    )


class StageSums(NamedTuple):
    """For all runs of blocks under one solution: seconds of a microbatch with its share of the once-a-step part, and
    bytes."""

    seconds: np.ndarray
    stored: np.ndarray
    saved: np.ndarray


def sums_of(front: StageFront, solution: StageSolution, width: int) -> StageSums:
    """[first block, blocks less one], for runs of up to `width` blocks."""
    used = solution.table(width)
    forward, backward = seconds_of(used, front.overlap)
    seconds = forward + backward + used[..., Resource.UPDATE] / front.microbatches
    return StageSums(seconds, used[..., Resource.STORED], used[..., Resource.KEPT])


class StageChoice:
    """For all runs of blocks on one kind of pipeline rank, with so many microbatches in flight, the best solutions
    within a memory limit.

    seconds    [first block, blocks less one]: of a microbatch, with its once-a-step share; infinity: does not fit
    """

    def __init__(
        self,
        front: StageFront,
        solutions: Sequence[StageSolution],
        sums: Sequence[StageSums],
        flight: float,
        room: float,
    ) -> None:
        self.front, self.solutions, self.flight, self.room = front, solutions, flight, room
        bytes = [run.stored + flight * run.saved for run in sums]
        self.seconds = np.full(sums[0].seconds.shape, np.inf)
        for at, (run, more) in enumerate(zip(sums, bytes, strict=True)):
            np.minimum(self.seconds, np.where(more <= room, run.seconds, np.inf), out=self.seconds)
            for faster in range(at):
                mixed = _mixed(sums[faster].seconds, bytes[faster], run.seconds, more, room)
                np.minimum(self.seconds, mixed, out=self.seconds)

    def pick(self, begin: int, end: int) -> tuple[StageCost, tuple[tuple[StageSolution, float], ...]]:
        """The stage of one run, and its solutions with their shares."""
        used = [solution.between(begin, end) for solution in self.solutions]
        best: tuple[float, tuple[tuple[int, float], ...]] = (np.inf, ())
        for at, lean in enumerate(used):
            for faster in range(at + 1):
                share = self._share(used[faster], lean) if faster < at else 1.0
                if share is None or (faster == at and self._bytes(lean) > self.room):
                    continue
                parts = ((at, share), (faster, 1.0 - share)) if faster < at else ((at, 1.0),)
                time = sum(part * self._seconds(used[number]) for number, part in parts)
                best = min(best, (time, parts), key=lambda option: option[0])
        mix = sum(part * used[number] for number, part in best[1])
        return stage_of(np.asarray(mix), self.front.overlap), tuple((self.solutions[at], part) for at, part in best[1])

    def _share(self, fast: np.ndarray, lean: np.ndarray) -> float | None:
        """The least share of the leaner solution that fits; None if mixing does not help."""
        high, low = self._bytes(fast), self._bytes(lean)
        return (high - self.room) / (high - low) if low <= self.room < high else None

    def _bytes(self, used: np.ndarray) -> float:
        return float(used[Resource.STORED] + self.flight * used[Resource.KEPT])

    def _seconds(self, used: np.ndarray) -> float:
        forward, backward = seconds_of(used, self.front.overlap)
        return float(forward + backward + used[Resource.UPDATE] / self.front.microbatches)


def _mixed(fast: np.ndarray, more: np.ndarray, slow: np.ndarray, less: np.ndarray, room: float) -> np.ndarray:
    """The time of the fastest mix of two solutions that fits, where only the leaner one does."""
    helps = (less <= room) & (more > room)
    share = np.divide(more - room, more - less, out=np.ones_like(more), where=helps)
    return np.where(helps, fast + share * (slow - fast), np.inf)

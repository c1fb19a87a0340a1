"""A stage: a run of blocks on a seat, and the way, or the two ways mixed, that fit its memory.

memory     what is stored + microbatches in flight * what each keeps + what comes and goes (`reserve`)
time       forward + backward of a microbatch + its part of what is done once a step
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
    """What a run of blocks takes on a device: seconds of a microbatch, of what comes once a step, and bytes.

    forward, backward    of a microbatch; backward has `weight` in it
    weight               the part of backward that makes gradients of parameters
    waited               communication inside of the stage in a microbatch, as far as it shows
    once                 the sync of gradients and the update
    stored               bytes that are there all the time
    kept                 bytes that a microbatch keeps from its forward to its backward
    queued               bytes that it keeps on from there until the gradients of parameters are made
    """

    forward: float
    backward: float
    weight: float
    waited: float
    once: float
    stored: float
    kept: float
    queued: float

    def memory(self, flight: float) -> float:
        return self.stored + flight * self.kept


def seconds_of(used: np.ndarray, overlap: float) -> tuple[np.ndarray, np.ndarray]:
    """Forward and backward of a microbatch for rows of columns (see `cost.resources`)."""
    rest, found = 1.0 - overlap, []
    for kind in ("FORWARD", "BACKWARD"):
        kernels, send, beside = (used[..., Resource[f"{part}_{kind}"]] for part in ("COMPUTE", "SEND", "BESIDE"))
        found.append(send + np.maximum(kernels + rest * beside, beside + rest * kernels))
    return found[0], found[1]


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
        kept=float(used[Resource.KEPT]),
        queued=float(min(used[QUEUED], used[Resource.KEPT])),
    )


class StageSums(NamedTuple):
    """For all runs of blocks under one way: seconds of a microbatch with its part of what comes once, and bytes."""

    seconds: np.ndarray
    stored: np.ndarray
    kept: np.ndarray


def sums_of(front: StageFront, way: StageSolution, width: int) -> StageSums:
    """[first block, blocks less one], for runs of up to `width` blocks."""
    used = way.table(width)
    forward, backward = seconds_of(used, front.overlap)
    seconds = forward + backward + used[..., Resource.UPDATE] / front.microbatches
    return StageSums(seconds, used[..., Resource.STORED], used[..., Resource.KEPT])


class StageChoice:
    """For all runs of blocks on one kind of seat, with so many microbatches in flight, the best ways within a limit.

    seconds    [first block, blocks less one]: of a microbatch, with its part of what comes once; infinity: does not fit
    """

    def __init__(
        self, front: StageFront, ways: Sequence[StageSolution], sums: Sequence[StageSums], flight: float, room: float
    ) -> None:
        self.front, self.ways, self.flight, self.room = front, ways, flight, room
        bytes = [held.stored + flight * held.kept for held in sums]
        self.seconds = np.full(sums[0].seconds.shape, np.inf)
        for at, (held, more) in enumerate(zip(sums, bytes, strict=True)):
            np.minimum(self.seconds, np.where(more <= room, held.seconds, np.inf), out=self.seconds)
            for faster in range(at):
                mixed = _mixed(sums[faster].seconds, bytes[faster], held.seconds, more, room)
                np.minimum(self.seconds, mixed, out=self.seconds)

    def pick(self, begin: int, end: int) -> tuple[StageCost, tuple[tuple[StageSolution, float], ...]]:
        """The stage of one run, and its ways with their shares."""
        used = [way.between(begin, end) for way in self.ways]
        best: tuple[float, tuple[tuple[int, float], ...]] = (np.inf, ())
        for at, one in enumerate(used):
            for faster in range(at + 1):
                share = self._share(used[faster], one) if faster < at else 1.0
                if share is None or (faster == at and self._bytes(one) > self.room):
                    continue
                parts = ((at, share), (faster, 1.0 - share)) if faster < at else ((at, 1.0),)
                time = sum(part * self._seconds(used[number]) for number, part in parts)
                best = min(best, (time, parts), key=lambda held: held[0])
        mix = sum(part * used[number] for number, part in best[1])
        return stage_of(np.asarray(mix), self.front.overlap), tuple((self.ways[at], part) for at, part in best[1])

    def _share(self, fast: np.ndarray, lean: np.ndarray) -> float | None:
        """The least part of the leaner way that fits; None if mixing is no use."""
        high, low = self._bytes(fast), self._bytes(lean)
        return (high - self.room) / (high - low) if low <= self.room < high else None

    def _bytes(self, used: np.ndarray) -> float:
        return float(used[Resource.STORED] + self.flight * used[Resource.KEPT])

    def _seconds(self, used: np.ndarray) -> float:
        forward, backward = seconds_of(used, self.front.overlap)
        return float(forward + backward + used[Resource.UPDATE] / self.front.microbatches)


def _mixed(fast: np.ndarray, more: np.ndarray, slow: np.ndarray, less: np.ndarray, room: float) -> np.ndarray:
    """The time of the leanest mix of two ways that fits, where only the leaner one does."""
    helps = (less <= room) & (more > room)
    share = np.divide(more - room, more - less, out=np.ones_like(more), where=helps)
    return np.where(helps, fast + share * (slow - fast), np.inf)

"""What a stage costs: a run of blocks on a pipeline rank, and the solution, or the mix of two, that fits its memory.

    memory     stored + microbatches in flight * saved for backward by each + transient memory (`reserve`)
    time       forward + backward of a microbatch + its share of what is done once a step

`StageFronts` has the Pareto fronts of all kinds of pipeline ranks, each made once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ...cost.resources import Resource
from ..tables import Tables
from .bounds import LeastCosts
from .microbatch_tables import MicrobatchTables
from .pareto_front import QUEUED, WEIGHT, Solver, StageFront, StageSolution
from .ranks import PipelineSetup, RankDevices
from .stage_cuts import BlockOfEntries, Blocks


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


Alike = tuple[tuple[int, ...], ...]
"""The indices of identical things, for each kind."""

COARSE = (1, 16, 64, 256, 1024)
"""Numbers of parts of a batch that are solved exactly; bounds for more parts scale from these."""


class StageFronts:
    """What the blocks of a graph use on pipeline ranks, for all numbers of microbatches."""

    def __init__(self, setup: PipelineSetup, blocks: Blocks) -> None:
        self.setup, self.blocks, self.cluster = setup, blocks, setup.cluster
        self.timed = MicrobatchTables(
            setup.analysis, setup.cluster, setup.training, setup.limits, setup.names,
            recompute=setup.recompute, local=setup.local, like=setup.context,
        )  # fmt: skip
        self.where: dict[bool, BlockOfEntries] = {}
        self._solver = Solver()
        self._fronts: dict[tuple[object, ...], StageFront | None] = {}
        self._quick: dict[tuple[int, int, int], float] = {}
        self._known: dict[
            tuple[int, int], dict[int, float]
        ] = {}  # parts of the batch to seconds, for each group and inner axis
        self._scales = [group.node.device.scales for group in self.cluster.groups]
        self._after: dict[tuple[object, ...], float] = {}
        self._sums: dict[tuple[int, int], StageSums] = {}

    def kind(self, pp_rank: RankDevices) -> tuple[object, ...]:
        return self.timed.kinds.of(pp_rank)

    def alike(self, pp_ranks: Sequence[RankDevices]) -> Alike:
        """The pipeline ranks of each kind."""
        kinds: dict[tuple[object, ...], list[int]] = {}
        for number, pp_rank in enumerate(pp_ranks):
            kinds.setdefault(self.kind(pp_rank), []).append(number)
        return tuple(map(tuple, kinds.values()))

    def of(self, pp_rank: RankDevices, microbatches: int) -> StageFront | None:
        """None if some op can't be sharded as the pipeline rank requires."""
        key = (self.kind(pp_rank), microbatches)
        if key not in self._fronts:
            self._fronts[key] = self._make(pp_rank, microbatches)
        return self._fronts[key]

    def _make(self, pp_rank: RankDevices, microbatches: int) -> StageFront | None:
        plain = self.timed.tables(pp_rank, microbatches)
        if plain is None:
            return None
        for skeleton in (self.timed.context.plain, self.timed.context.recomputing):
            if bool(skeleton.layers) not in self.where:
                self.where[bool(skeleton.layers)] = BlockOfEntries(skeleton, self.blocks)

        def recomputing() -> Tables | None:
            return self.timed.tables(pp_rank, microbatches, recomputing=True)

        return StageFront(plain, recomputing, self.where, self._solver, microbatches)

    def quick(self, pp_rank: RankDevices, microbatches: int) -> float:
        """A lower bound on the seconds of a microbatch if all blocks were on this rank, of ops and reshards alone."""
        key = self._key(pp_rank, microbatches)
        if key not in self._quick:
            front = self.of(pp_rank, microbatches)
            self._quick[key] = math.inf if front is None else front.least
            self._known.setdefault((key[0], key[2]), {})[key[1]] = self._quick[key]
        return self._quick[key]

    def _key(self, pp_rank: RankDevices, microbatches: int) -> tuple[int, int, int]:
        """What determines a microbatch's time: the group of devices, the parts of the batch, the inner axis."""
        return self.cluster.node_of(pp_rank.devices[0])[0], pp_rank.data * self.setup.parts(microbatches), pp_rank.inner

    def rough(self, pp_rank: RankDevices, microbatches: int) -> float:
        """A cheaper lower bound, scaled from larger parts of the batch; `quick` where none is known."""
        group, parts, inner = key = self._key(pp_rank, microbatches)
        if key in self._quick or not self._scales[group]:
            return self.quick(pp_rank, microbatches)
        if self._coarse(pp_rank, 1) is None:
            return self.quick(pp_rank, microbatches)
        return max(
            seconds * larger / parts
            for larger, seconds in self._known[group, inner].items()
            if parts % larger == 0 and seconds < math.inf
        )

    def _coarse(self, pp_rank: RankDevices, parts: int) -> StageFront | None:
        """The front of the inner axis alone with the batch in so many parts, if there is one."""
        inner = replace(pp_rank, devices=pp_rank.devices[: pp_rank.inner], data=1)
        return self.of(inner, parts) if self.quick(inner, parts) < math.inf else None

    def fits(self, pp_rank: RankDevices, microbatches: int, flight: float, room: float) -> bool:
        """Whether the fastest solution fits if all blocks are on this rank: then bounds can ignore memory."""
        front = self._coarse(pp_rank, 1)
        if front is None or front.fastest is None:
            return False
        saved = float(front.fastest.total[Resource.KEPT]) / pp_rank.data / self.setup.parts(microbatches)
        return flight * saved + self.timed.parameters(pp_rank, microbatches).fast_stored(microbatches) <= room

    def floor(self, pp_rank: RankDevices, microbatches: int, times: float, flight: float) -> LeastCosts | None:
        """A lower bound on `StageFront.tight`, scaled from larger parts of the batch; None where none is known."""
        parts = pp_rank.data * self.setup.parts(microbatches)
        larger = 1 if self.setup.local else max(at for at in COARSE if parts % at == 0)
        front = self._coarse(pp_rank, larger) if self._scales[self._key(pp_rank, 1)[0]] else None
        floor = front.floor if front is not None else None
        if floor is None:
            return None
        parameters, share = self.timed.parameters(pp_rank, microbatches), larger / parts
        prices = floor.prices * times / flight
        least = times * share * floor.least + parameters.least_at(prices, microbatches)
        return LeastCosts(prices, least, flight * share * floor.bytes + parameters.stored)

    def after(self, pp_rank: RankDevices, microbatches: int) -> float:
        """A lower bound on the seconds of a step for parameters alone, if all are on this rank."""
        key = (self.kind(pp_rank), microbatches)
        if key not in self._after:
            self._after[key] = float(
                self.timed.parameters(pp_rank, microbatches).least_at(np.zeros(1), microbatches)[0]
            )
        return self._after[key]

    def sums(self, front: StageFront, solution: StageSolution, width: int) -> StageSums:
        key = (id(solution), width)
        if key not in self._sums:
            self._sums[key] = sums_of(front, solution, width)
        return self._sums[key]

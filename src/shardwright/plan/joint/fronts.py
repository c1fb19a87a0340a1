"""The fronts of all kinds of pipeline ranks, each made once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from ...cost.resources import Resource
from ..tables import Tables
from .blocks import BlockOfEntries, Blocks
from .bounds import LeastCosts
from .front import StageFront, StageSolution
from .ranks import RankDevices
from .setup import PipelineSetup
from .solver import Solver
from .stage import StageSums, sums_of
from .timed import MicrobatchTables

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

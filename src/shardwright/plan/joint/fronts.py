"""The fronts of all kinds of seats, each made once."""

from __future__ import annotations

import math
from dataclasses import replace

from ...cluster import Device
from ..tables import Tables
from .blocks import Blocks, Where
from .front import Front, Way
from .seats import Seat
from .setup import Setup
from .solver import Solver
from .stage import Sums, sums_of
from .timed import Timed


class Fronts:
    """What the blocks of a graph use on seats, whatever the number of microbatches."""

    def __init__(self, setup: Setup, blocks: Blocks) -> None:
        self.setup, self.blocks, self.cluster = setup, blocks, setup.cluster
        self.timed = Timed(
            setup.facts, setup.cluster, setup.training, setup.limits, setup.names,
            recompute=setup.recompute, local=setup.local,
        )  # fmt: skip
        self.where: dict[bool, Where] = {}
        self._solver = Solver()
        self._fronts: dict[tuple[object, ...], Front | None] = {}
        self._quick: dict[tuple[object, ...], float] = {}
        self._kinds: dict[Seat, tuple[object, ...]] = {}
        self._sums: dict[tuple[int, int], Sums] = {}

    def kind(self, seat: Seat) -> tuple[object, ...]:
        if seat not in self._kinds:
            self._kinds[seat] = seat.kind(self.cluster)
        return self._kinds[seat]

    def of(self, seat: Seat, microbatches: int) -> Front | None:
        """None if some op can't be split as a seat asks for."""
        key = (self.kind(seat), microbatches)
        if key not in self._fronts:
            self._fronts[key] = self._made(seat, microbatches)
        return self._fronts[key]

    def _made(self, seat: Seat, microbatches: int) -> Front | None:
        plain = self.timed.tables(seat, microbatches)
        if plain is None:
            return None
        for skeleton in (self.timed.frame.plain, self.timed.frame.recomputing):
            if bool(skeleton.layers) not in self.where:
                self.where[bool(skeleton.layers)] = Where(skeleton, self.blocks)

        def again() -> Tables | None:
            return self.timed.tables(seat, microbatches, again=True)

        return Front(plain, again, self.where, self._solver, microbatches)

    def quick(self, seat: Seat, microbatches: int) -> float:
        """Seconds of a microbatch if all blocks were on this seat, at least; what is done once a step is left out."""
        key = self._key(seat, microbatches)
        if key not in self._quick:
            front = self.of(seat, microbatches)
            self._quick[key] = math.inf if front is None else front.least
        return self._quick[key]

    def _key(self, seat: Seat, microbatches: int) -> tuple[Device, int, int]:
        """What decides how long a microbatch takes: the device, parts of the batch, devices of the inner axis."""
        return self.cluster.device(seat.devices[0]), seat.data * self.setup.parts(microbatches), seat.inner

    def rough(self, seat: Seat, microbatches: int) -> float:
        """The same from below, as a part of what the whole batch takes at once; exact where that says nothing."""
        device, parts, _ = key = self._key(seat, microbatches)
        if key in self._quick or not device.scales:
            return self.quick(seat, microbatches)
        whole = self.quick(replace(seat, devices=seat.devices[: seat.inner], data=1), 1)
        return whole / parts if whole < math.inf else self.quick(seat, microbatches)

    def sums(self, front: Front, way: Way, width: int) -> Sums:
        key = (id(way), width)
        if key not in self._sums:
            self._sums[key] = sums_of(front, way, width)
        return self._sums[key]

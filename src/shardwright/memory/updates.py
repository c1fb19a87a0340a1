"""The memory of gradients on their way to the optimizer: buckets, and the units of ZeRO-3.

Both follow the runtime: `runtime/parameters/buckets.py` for buckets, `runtime/parameters/zero3_shards.py` for units.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..cost.training import BackendTraits, TrainingSetup
from ..ir.paths import layer_of
from .heap import BUFFER, GRADIENT, Heap
from .rank_program import ParameterMemory, RankStep

FIRST_BUCKET, BUCKET = 1 * 2**20, 25 * 2**20
IN_FLIGHT = 2
"""How many sums of split gradients are under way before the oldest is awaited."""


class BucketMemory:
    def __init__(self) -> None:
        self.bytes = self.share = 0.0
        self.missing = 0
        self.flat: int | None = None
        self.copy: int | None = None  # of the collective


class GradientBuckets:
    """Gradients that are summed in flat buffers.

    Buckets of full gradients are the gradients, and their memory is never given back. Where gradients are sharded a
    buffer lives until its sum is through, and the own share of it stays.
    """

    def __init__(
        self, parameters: Sequence[ParameterMemory], heap: Heap, training: TrainingSetup, traits: BackendTraits
    ) -> None:
        self.heap, self.copies = heap, traits.copies
        self.of: dict[str, BucketMemory] = {}
        self.order: list[BucketMemory] = []
        self.sent: list[BucketMemory] = []
        synced = [
            parameter
            for parameter in parameters
            if parameter.trainable and parameter.sums and not parameter.storage.shards_parameter
        ]
        full = [parameter for parameter in synced if not parameter.storage.shards_gradient]
        heap.new(sum(parameter.bytes for parameter in full), GRADIENT)
        heap.new(sum(parameter.bytes * parameter.wider for parameter in full if parameter.wider > 1), GRADIENT)
        if training.accumulate > 1:  # gradients of earlier backwards, not summed yet
            heap.new(
                sum(
                    parameter.bytes * parameter.wider
                    for parameter in parameters
                    if parameter.trainable and not parameter.storage.shards_parameter
                ),
                GRADIENT,
            )
        room: dict[tuple[str, ...], float] = {}
        open_: dict[tuple[str, ...], BucketMemory] = {}
        for parameter in reversed(synced):
            key = (*parameter.sums, parameter.storage.name)
            if key not in open_ or parameter.bytes > room[key]:
                room[key] = BUCKET if self.order else FIRST_BUCKET
                open_[key] = BucketMemory()
                self.order.append(open_[key])
            bucket = open_[key]
            bucket.missing += 1
            room[key] -= parameter.bytes
            if parameter.storage.shards_gradient:
                bucket.bytes += parameter.bytes
                bucket.share += parameter.storage.stored(parameter.bytes, parameter.parts).gradient * parameter.wider
            self.of[parameter.key] = bucket
        self.next = 0

    def arrived(self, parameter: ParameterMemory) -> None:
        bucket = self.of[parameter.key]
        if bucket.flat is None:
            bucket.flat = self.heap.new(bucket.bytes, BUFFER)
        bucket.missing -= 1
        while self.next < len(self.order) and not self.order[self.next].missing:
            self._send(self.order[self.next])
            self.next += 1

    def _send(self, bucket: BucketMemory) -> None:
        self.heap.new(bucket.share, GRADIENT)
        if self.copies:
            bucket.copy = self.heap.new(bucket.bytes, BUFFER)
        self.sent.append(bucket)
        while len(self.sent) > IN_FLIGHT:
            self._finish(self.sent.pop(0))

    def _finish(self, bucket: BucketMemory) -> None:
        for storage in (bucket.flat, bucket.copy):
            if storage is not None:
                self.heap.drop(storage)

    def end(self) -> None:
        for bucket in self.order[self.next :]:
            if bucket.flat is None:
                bucket.flat = self.heap.new(bucket.bytes, BUFFER)
            self._send(bucket)
        for bucket in self.sent:
            self._finish(bucket)


class Zero3Unit:
    """Parameters that ZeRO-3 gathers together."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.whole = self.trained = self.share = 0.0
        self.missing = 0
        self.rows: list[int] = []  # gathered, rank by rank, and the copy of the collective
        self.flat: int | None = None  # the whole parameters
        self.gradients: list[int] = []


class Zero3Units:
    """The units of ZeRO-3: gathered one ahead, forward and backward, and released after their last use.

    What is outside of layers is one unit. The program never closes it: it holds it until it is gathered anew.
    """

    def __init__(
        self, parameters: Sequence[ParameterMemory], steps: Sequence[RankStep], heap: Heap, traits: BackendTraits
    ) -> None:
        self.heap = heap
        self.copies = traits.copies
        self.units: dict[str, Zero3Unit] = {}
        self.of: dict[int, Zero3Unit] = {}
        for parameter in parameters:
            if parameter.storage.shards_parameter:
                unit = self.units.setdefault(layer_of(parameter.key), Zero3Unit(layer_of(parameter.key)))
                self.of[parameter.value] = unit
                unit.whole += parameter.gathered
                if parameter.trainable:
                    unit.trained += parameter.bytes
                    unit.share += parameter.share * parameter.wider
                    unit.missing += 1
        self.opens: dict[int, list[Zero3Unit]] = {}
        self.closes: dict[int, list[Zero3Unit]] = {}
        self.keeps: dict[int, list[Zero3Unit]] = {}
        self.sent: list[int] = []
        self.regathered: list[Zero3Unit] = []
        self.order: list[Zero3Unit] = []
        self._find_uses(steps)
        outside = self.units.get("")
        self.resident = None if outside is None else heap.new(outside.whole, BUFFER)

    def _find_uses(self, steps: Sequence[RankStep]) -> None:
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for at, step in enumerate(steps) if self.units else ():
            for unit in dict.fromkeys(self.of[number] for number in step.inputs if number in self.of):
                first.setdefault(unit.name, at)
                last[unit.name] = at
            saved_units = dict.fromkeys(self.of[number] for number in step.saved if number in self.of)
            if saved_units:
                self.keeps[at] = list(saved_units)
        for name, at in sorted(first.items(), key=lambda pair: pair[1]):
            self.opens.setdefault(at, []).append(self.units[name])
            self.order.append(self.units[name])
            if name:
                self.closes.setdefault(last[name], []).append(self.units[name])

    def before(self, at: int) -> None:
        for unit in self.opens.get(at, ()):
            self._gather(unit, 1)
            if not unit.name and self.resident is not None:
                self.heap.drop(self.resident)
                self.resident = None

    def after(self, at: int) -> None:
        for unit in self.closes.get(at, ()):
            self._release(unit)

    def again(self, at: int) -> None:
        """Backward wants what a step kept of a unit."""
        for unit in self.keeps.get(at, ()):
            if unit in self.regathered:
                continue
            self.regathered.append(unit)
            while len(self.regathered) > IN_FLIGHT:
                self._release(self.regathered.pop(0))
            self._gather(unit, -1)

    def _gather(self, unit: Zero3Unit, ahead: int) -> None:
        self._fetch(unit)
        if unit.flat is None:
            for copy in unit.rows[1:]:
                self.heap.drop(copy)
            unit.flat = self.heap.new(unit.whole, BUFFER)
            self.heap.drop(unit.rows[0])
            unit.rows.clear()
        place = self.order.index(unit) + ahead
        if 0 <= place < len(self.order):
            self._fetch(self.order[place])

    def _fetch(self, unit: Zero3Unit) -> None:
        if not unit.rows and unit.flat is None:
            unit.rows = [self.heap.new(unit.whole, BUFFER) for _ in range(2 if self.copies else 1)]

    def _release(self, unit: Zero3Unit) -> None:
        if unit.flat is not None and not unit.name:
            self.resident = unit.flat
        elif unit.flat is not None:
            self.heap.drop(unit.flat)
        for storage in unit.rows:
            self.heap.drop(storage)
        unit.rows.clear()
        unit.flat = None

    def arrived(self, parameter: ParameterMemory, storage: int | None) -> None:
        """A whole gradient; the last of a unit sends all of them off."""
        unit = self.of[parameter.value]
        if storage is not None:
            unit.gradients.append(storage)
        unit.missing -= 1
        if unit.missing:
            return
        if unit in self.regathered:
            self.regathered.remove(unit)
        self._release(unit)
        self.sent.append(self.heap.new(unit.trained * (2 if self.copies else 1), BUFFER))
        self.heap.new(unit.share, GRADIENT)
        for held_gradient in unit.gradients:
            self.heap.drop(held_gradient)
        unit.gradients.clear()
        while len(self.sent) > IN_FLIGHT:
            self.heap.drop(self.sent.pop(0))

    def end(self) -> None:
        for storage in self.sent:
            self.heap.drop(storage)
        self.sent.clear()
        for unit in self.order:
            self._release(unit)

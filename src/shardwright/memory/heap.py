"""Storages with reference counts, and the highest sum that they ever had."""

from __future__ import annotations

from typing import NamedTuple

ACTIVATION, GRADIENT, BUFFER = range(3)


class MemorySample(NamedTuple):
    """Bytes at the worst moment of one step of a phase, without what lives for ever."""

    phase: str
    step: str
    activations: float
    gradients: float
    buffers: float

    @property
    def total(self) -> float:
        return self.activations + self.gradients + self.buffers


class Heap:
    """What is allocated now, by kind, and at the peak. `phase` and `step` say where the caller is.

    With `records` also the worst moment of each step, in their order (`samples`).
    """

    def __init__(self, records: bool = False) -> None:
        self.records = records
        self.samples: list[MemorySample] = []
        self.size: list[float] = [0.0]
        self.refs: list[int] = [1]
        self.kind: list[int] = [BUFFER]
        self.fixed = 0  # a storage that lives for ever and is counted elsewhere
        self.now = [0.0, 0.0, 0.0]
        self.total = 0.0
        self.at_peak = [0.0, 0.0, 0.0]
        self.highest = -1.0
        self.where = ("", "")
        self.peaks = {"forward": 0.0, "backward": 0.0, "update": 0.0}
        self.phase, self.step = "forward", ""

    def new(self, size: float, kind: int) -> int:
        self.size.append(size)
        self.refs.append(1)
        self.kind.append(kind)
        self.now[kind] += size
        self.total += size
        self._look(0.0)
        return len(self.size) - 1

    def hold(self, storage: int) -> int:
        self.refs[storage] += 1
        return storage

    def drop(self, storage: int) -> None:
        self.refs[storage] -= 1
        if not self.refs[storage]:
            self.now[self.kind[storage]] -= self.size[storage]
            self.total -= self.size[storage]

    def relabel(self, storage: int, kind: int) -> None:
        """Count a storage as another kind from now on."""
        self.now[self.kind[storage]] -= self.size[storage]
        self.now[kind] += self.size[storage]
        self.kind[storage] = kind

    def touch(self, size: float) -> None:
        """Allocate some bytes and let them go again."""
        self._look(size)

    def _look(self, work: float) -> None:
        total = self.total + work
        if self.records:
            self._record(work)
        if total > self.peaks[self.phase]:
            self.peaks[self.phase] = total
            if total > self.highest:
                self.highest = total
                self.at_peak = [*self.now]
                self.at_peak[BUFFER] += work
                self.where = (self.step, self.phase)

    def _record(self, work: float) -> None:
        sample = MemorySample(
            self.phase, self.step, self.now[ACTIVATION], self.now[GRADIENT], self.now[BUFFER] + work
        )
        if not self.samples or self.samples[-1][:2] != sample[:2]:
            self.samples.append(sample)
        elif sample.total > self.samples[-1].total:
            self.samples[-1] = sample

"""Which ranks are alive: each writes a heartbeat into the store, and says which process it is.

A rank on this machine is gone when its process has ended; one on another machine counts as lost when its heartbeat
has not changed for a while.
"""

from __future__ import annotations

import os
import time

from ..collectives.processes import machine_name, runs
from .bounded_store import BoundedStore

BEAT = 1.0  # seconds between two heartbeats
SILENCE = 10.0  # seconds without a heartbeat after which a rank counts as lost, once something has failed

Beats = dict[int, tuple[bytes, float]]
"""By rank: the last heartbeat that was seen, and when it was new."""


class Heartbeats:
    """The heartbeat of this rank, and those of the others."""

    def __init__(self, store: BoundedStore, rank: int, size: int) -> None:
        self._store, self._rank = store, rank
        self.others = [other for other in range(size) if other != rank]
        self.interval = BEAT * max(1.0, size / 256)
        self._processes: dict[int, int | None] = {}  # the process ids of the ranks on this machine
        store.set(f"who/{rank}", f"{machine_name()} {os.getpid()}")
        self.beat(0, 0)

    def beat(self, count: int, call: int) -> None:
        """Say that this rank is alive, and which call of a model it is at."""
        self._store.set(f"beat/{self._rank}", f"{count} {call}")

    def call_of(self, rank: int) -> int:
        """The call that another rank has last reported."""
        key = f"beat/{rank}"
        return int(self._store.get(key).split()[1]) if self._store.check([key]) else 0

    def gone(self) -> list[int]:
        """The ranks on this machine whose process has ended."""
        for rank in self.others:
            if rank not in self._processes and self._store.check([f"who/{rank}"]):
                machine, number = self._store.get(f"who/{rank}").decode().rsplit(" ", 1)
                self._processes[rank] = int(number) if machine == machine_name() else None
        return [rank for rank, number in self._processes.items() if number is not None and not runs(number)]

    def silent(self, beats: Beats) -> list[int]:
        """The ranks without a recent heartbeat. `beats` are those seen so far, and are brought up to date."""
        now = time.monotonic()
        keys = [f"beat/{rank}" for rank in self.others]
        if self._store.check(keys):
            for rank, beat in zip(self.others, self._store.multi_get(keys), strict=True):
                if rank not in beats or beats[rank][0] != beat:
                    beats[rank] = (beat, now)
        return [rank for rank, (_, seen) in beats.items() if now - seen > max(SILENCE, 5 * self.interval)]

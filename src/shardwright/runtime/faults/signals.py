"""Signals that stop a run: after the current step, on all ranks, even if only one received it.

    with StopSignals() as signals:
        for batch in batches:
            ...
            if signals.agreed():
                sw.save(...)
                break

A cluster sends SIGTERM before it kills, and Slurm SIGUSR1 with --signal=USR1@120. A second SIGTERM stops at once, but
not within a few seconds of the first, since a launcher and its scheduler may both send one. Ctrl-C (SIGINT) is the same
from a keyboard: the second raises KeyboardInterrupt, unless it comes at once, as from a terminal and torchrun together.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from types import FrameType
from typing import Any

from shardwright.errors import InputError

from ..collectives import objects

USUAL = ("SIGTERM", "SIGUSR1", "SIGINT")
PAUSES = {signal.SIGTERM: 5.0, signal.SIGINT: 0.5}
"""Signals of which the second ends the process, unless it comes within these seconds."""


class StopSignals(AbstractContextManager["StopSignals"]):
    """Listens to signals while open. `received` is the name of the first one on this rank."""

    def __init__(self, names: Sequence[str] = USUAL, then: Callable[[str], None] | None = None) -> None:
        """`then` is called with the name of the first signal, between two lines of the main thread."""
        strange = [name for name in names if not isinstance(getattr(signal, name, None), signal.Signals)]
        if strange:
            raise InputError(f"{', '.join(strange)}: not a signal of this system; use names such as SIGTERM")
        self.names, self.received = tuple(names), ""
        self._then, self._before, self._when = then, dict[int, Any](), 0.0
        self._process = os.getpid()

    def __enter__(self) -> StopSignals:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self) -> None:
        """Install the handlers. Only the main thread can."""
        if threading.current_thread() is threading.main_thread() and not self._before:
            for name in self.names:
                number = int(getattr(signal, name))
                self._before[number] = signal.signal(number, self._come)

    def close(self) -> None:
        """Restore the previous handlers."""
        for number, before in self._before.items():
            signal.signal(number, before)
        self._before.clear()

    def _come(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if os.getpid() != self._process:  # a forked DataLoader worker: ignore
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if self.received and now - self._when > PAUSES.get(signal.Signals(number), math.inf):
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        if not self.received:
            self.received, self._when = signal.Signals(number).name, now
            if self._then is not None:
                self._then(self.received)

    def agreed(self) -> bool:
        """Whether any rank has received one. All ranks must call it, after the same steps: one small all_gather."""
        return any(objects.all_gather_numbers(int(bool(self.received)), "whether to stop"))

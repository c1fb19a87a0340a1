"""How long a training step of a model really takes: from one training call to the next.

    call    forward, backward    update    load data │ call ...
    └─────────────────── a step ────────────────────┘

So a step has all that the loop does in it; with gradient accumulation it is so many calls. What does not count: the
first steps of a program, in which memory is allocated and caches fill, and steps in which another program or an
evaluation ran. Nothing waits for the device: its marks are read when it has passed them (`accelerator.Mark`).
"""

from __future__ import annotations

from collections import deque
from statistics import median

import torch

from .. import accelerator

WARM_UP = 3  # steps of a program that do not count
RECENT = 50  # steps that the median is of
UNDER_WAY = 100  # steps that a device may be behind; older ones are given up


class StepTimes:
    """The recent steps of a model's training program on this rank."""

    def __init__(self, device: torch.device, calls: int = 1) -> None:
        """`calls`: how many times a step calls the model."""
        self.device, self.calls = device, calls
        self._program: object = None
        self._called = self._steps = 0  # of this program
        self._last: accelerator.Mark | None = None
        self._pending: deque[tuple[accelerator.Mark, accelerator.Mark]] = deque(maxlen=UNDER_WAY)
        self._recent: deque[float] = deque(maxlen=RECENT)

    def begin(self, program: object) -> None:
        """A training call of a program begins."""
        if program is not self._program:
            self._program, self._called, self._steps = program, 0, 0
            self._pending.clear()
            self._recent.clear()
            self._last = None
        self._called += 1
        if (self._called - 1) % self.calls:
            return
        now = accelerator.mark(self.device)
        if self._last is not None:
            self._steps += 1
            if self._steps > WARM_UP:
                self._pending.append((self._last, now))
        self._last = now

    def interrupt(self) -> None:
        """Something else ran: the step under way does not count."""
        self._last = None

    @property
    def count(self) -> int:
        """How many steps the median is of."""
        self._settle()
        return len(self._recent)

    @property
    def seconds(self) -> float | None:
        """The median of the recent steps on this rank; None while there are none."""
        return median(self._recent) if self.count else None

    def _settle(self) -> None:
        while self._pending:
            passed = accelerator.seconds_between(*self._pending[0])
            if passed is None:
                return
            self._recent.append(passed)
            self._pending.popleft()

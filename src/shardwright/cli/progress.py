"""Progress on the command line; Ctrl-C ends a search with the best plan so far."""

from __future__ import annotations

import math
import signal
import threading
from types import FrameType
from typing import Any

from rich.console import Console
from rich.status import Status

from ..report.text import format_time


def working(what: str) -> Status:
    """Within this, a terminal shows what is being done. On standard error, so that output can be piped."""
    return Status(what, console=Console(stderr=True))


class SearchProgress:
    """Shows a search while it runs. The first Ctrl-C stops it with the best plan so far, the second aborts.

    Before the search has begun (while the model is captured) Ctrl-C aborts at once. If it arrives in a callback
    that can't raise, of which torch has many, the search ends as soon as it has a plan.
    """

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self.status = Status("capturing the model", console=self.console)
        self.stop_requested = False
        self.searching = False
        self._before: Any = None

    def __enter__(self) -> SearchProgress:
        self.status.start()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGINT, self._interrupted)
        return self

    def __exit__(self, *error: object) -> None:
        self.status.stop()
        if self._before is not None:
            signal.signal(signal.SIGINT, self._before)

    def __call__(self, what: str, best: float) -> None:
        """Progress of the search."""
        self.searching = True
        best_text = f"; the best step so far takes {format_time(best)}" if math.isfinite(best) else ""
        self.status.update(f"{what}{best_text}")

    def stopped(self) -> bool:
        return self.stop_requested

    def _interrupted(self, number: int, frame: FrameType | None) -> None:
        again, self.stop_requested = self.stop_requested, True
        if again or not self.searching:
            raise KeyboardInterrupt
        self.console.print("stopping with the best plan so far; press Ctrl-C again to abort", highlight=False)

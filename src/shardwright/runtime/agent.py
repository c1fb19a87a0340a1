"""Ranks end when the launcher that started them is gone.

A launcher that is killed can't end its ranks, and nobody else does: they would train and save on, beside those that
its successor starts. The launcher need not be the parent, since there may be a script between: it is the nearest
process above that does not have the variables which it gives to its ranks.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from .collectives.processes import began, runs

MARKS = ("TORCHELASTIC_RUN_ID", "SLURM_PROCID")
"""What torchrun and srun give to each rank. A shell that somebody started ranks from by hand may end."""
BEAT = 1.0  # seconds

_watching: threading.Thread | None = None


def end_with_agent() -> None:
    """Watch the launcher, if there is one. May be called again."""
    mark = next((name for name in MARKS if name in os.environ), None)
    if mark is not None and _watching is None and sys.platform.startswith("linux"):
        agent = find_agent(mark)
        if agent is not None:
            end_with(agent)


def end_with(agent: int) -> None:
    """Watch a process from a thread, and end this one when it is gone. Once for a process, on Linux."""
    global _watching
    if _watching is None and sys.platform.startswith("linux"):
        _watching = threading.Thread(
            target=_watch, args=(agent, began(agent)), name="shardwright-agent", daemon=True
        )  # fmt: skip
        _watching.start()


def find_agent(mark: str) -> int | None:
    """The nearest process above this one without a variable; None if it can't be seen."""
    for number in _above(os.getpid()):
        try:
            names = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
        except OSError:  # of another user, as slurmstepd is
            return number
        if not any(name.startswith(f"{mark}=".encode()) for name in names):
            return number
    return None


def _above(number: int) -> Iterator[int]:
    while number > 1:
        try:
            number = int(Path(f"/proc/{number}/stat").read_text().rsplit(")", 1)[1].split()[1])
        except OSError:
            return
        if number > 0:
            yield number


def _watch(agent: int, start: str) -> None:
    while runs(agent) and began(agent) == start:
        time.sleep(BEAT)
    sys.stderr.write(
        f"shardwright.errors.RankError: the launcher that started this rank (process {agent}) is gone; the rank "
        f"(process {os.getpid()}) ends, so that it does not train on beside a new start\n"
    )
    sys.stderr.flush()
    os._exit(1)

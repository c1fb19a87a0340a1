"""Architectures measured in worker processes: a crash or a hang costs one row, not the run."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from typing import Any

from .listed import Architecture
from .measure import Depth, Row, rows

LIMIT = 120.0  # seconds for a row
MOST = 40  # architectures that a worker takes before a fresh one takes over: torch keeps what it has traced


@dataclass
class Worker:
    """A process that measures what it is handed."""

    process: Any
    pipe: Connection
    at: Architecture | None = None
    deadline: float = 0.0
    sent: int = 0
    handed: int = 0
    done: bool = field(default=False)

    def hand(self, architecture: Architecture) -> None:
        self.at, self.sent, self.handed = architecture, 0, self.handed + 1
        self.deadline = time.monotonic() + LIMIT
        self.pipe.send(architecture)

    def end(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


def measured(wanted: Sequence[Architecture], jobs: int, depth: Depth = "verified") -> Iterator[Row]:
    """The rows of all architectures, in the order in which they come."""
    waiting = list(reversed(wanted))
    workers = [_start(depth) for _ in range(min(jobs, len(wanted)))]
    try:
        for worker in workers:
            worker.hand(waiting.pop())
        while any(worker.at for worker in workers):
            ready = wait([worker.pipe for worker in workers if worker.at], timeout=1.0)
            for number, worker in enumerate(workers):
                if worker.at is None:
                    continue
                row, lost = _news(worker) if worker.pipe in ready else (None, "")
                if not row and not lost and time.monotonic() > worker.deadline:
                    lost = f"it did not end within {LIMIT:.0f} s"
                if row is not None:
                    yield row
                if lost:
                    yield from _lost(worker, lost)
                    worker.at = None
                if worker.at is None:
                    if lost or worker.handed >= MOST:
                        worker.end()
                        worker = workers[number] = _start(depth)
                    if waiting:
                        worker.hand(waiting.pop())
    finally:
        for worker in workers:
            worker.end()


def _start(depth: Depth) -> Worker:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, depth), daemon=True)
    process.start()
    theirs.close()
    return Worker(process, ours)


def _news(worker: Worker) -> tuple[Row | None, str]:
    """A row, or why there will be none."""
    try:
        actual = worker.pipe.recv()
    except (EOFError, ConnectionError):
        worker.process.join(5)
        return None, f"the process died with code {worker.process.exitcode}"
    worker.deadline = time.monotonic() + LIMIT
    if actual is None:
        worker.at = None
        return None, ""
    worker.sent += 1
    return actual, ""


def _lost(worker: Worker, why: str) -> Iterator[Row]:
    """The row that was not sent, and the one with labels that would have come after it: neither is left out."""
    assert worker.at is not None
    for labels in (False, True)[worker.sent :]:
        yield Row(model_type=worker.at.model_type, kind=worker.at.kind, model=worker.at.model, labels=labels,
                  built=True, reason=why)  # fmt: skip


def _work(pipe: Connection, depth: Depth) -> None:
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            architecture = pipe.recv()
        except EOFError:
            return
        for row in rows(architecture, depth):
            pipe.send(row)
        pipe.send(None)

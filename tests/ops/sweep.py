"""Many subjects in several processes. A process that dies takes one subject with it, and another one goes on."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal

import torch

from tests.ops.cases import Sample, module_samples, op_samples
from tests.ops.judge import Verdict, described, judge
from tests.ops.optimizers import judge_optimizer
from tests.ops.split import judge_splits

Suite = Literal["op", "module", "optimizer"]
PATIENCE = 120
"""Seconds that one sample may take."""


@dataclass(frozen=True, order=True)
class Task:
    suite: Suite
    subject: str
    dtype: str
    limit: int | None = None  # samples
    split: int = 0  # samples that are split as well


@dataclass(frozen=True)
class Finding:
    """What came of one sample, on one device or split."""

    task: Task
    sample: str
    ways: int  # ranks
    verdict: Verdict


def carry_out(task: Task) -> list[Finding]:
    """All samples of a subject."""
    if task.suite == "optimizer":
        return [Finding(task, message, ways, verdict) for message, ways, verdict in judge_optimizer(task.subject)]
    make = op_samples if task.suite == "op" else module_samples
    collected: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="shardwright-ops-") as folder:
        for sample in make(task.subject, task.dtype, task.limit):
            first = _timed(sample, lambda sample=sample: [(1, judge(sample, Path(folder)))])
            collected += [Finding(task, str(sample), ways, verdict) for ways, verdict in first]
            if sample.number < task.split and first[0][1].kind in ("right", "drawn"):
                some = _timed(sample, lambda sample=sample: judge_splits(sample))
                collected += [Finding(task, str(sample), ways, verdict) for ways, verdict in some]
    return collected


def _timed(sample: Sample, call: Callable[[], list[tuple[int, Verdict]]]) -> list[tuple[int, Verdict]]:
    try:
        with _patience():
            return call()
    except TimeoutError:
        return [(1, Verdict("foreign", f"no end within {PATIENCE} s"))]


@contextmanager
def _patience() -> Iterator[None]:
    def ring(*_: Any) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def sweep(tasks: Sequence[Task], processes: int, tell: Callable[[str], None]) -> Iterator[Finding]:
    """Carry out tasks in several processes, findings as they come."""
    context = multiprocessing.get_context("spawn")
    waiting, busy = list(reversed(tasks)), dict[Connection, tuple[Any, Task]]()
    start, done = time.monotonic(), 0

    def begin() -> None:
        ours, theirs = context.Pipe()
        process = context.Process(target=_work, args=(theirs,), daemon=True)
        process.start()
        theirs.close()
        _hand_on(ours, process)

    def _hand_on(connection: Connection, process: Any) -> None:
        if not waiting:
            connection.send(None)
            return
        task = waiting.pop()
        connection.send(task)
        busy[connection] = process, task

    for _ in range(min(processes, len(tasks))):
        begin()
    while busy:
        for ready in wait(list(busy)):
            assert isinstance(ready, Connection)
            process, task = busy.pop(ready)
            done += 1
            try:
                yield from ready.recv()
            except EOFError:
                yield Finding(task, task.subject, 1, Verdict("foreign", "the process died"))
                if waiting:
                    begin()
            else:
                _hand_on(ready, process)
            if done % 20 == 0 or not busy:
                tell(f"{done} of {len(tasks)} subjects, {time.monotonic() - start:.0f} s")


def _work(connection: Connection) -> None:
    torch.set_num_threads(1)
    while (task := connection.recv()) is not None:
        try:
            actual = carry_out(task)
        except Exception as error:  # of the samples themselves
            actual = [Finding(task, task.subject, 1, Verdict("skipped", described(error)))]
        connection.send(actual)

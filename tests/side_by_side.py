"""Runs the tests in two processes, one for each core: `python -m tests.side_by_side [paths] [options of pytest]`.

A unit is a file of tests. Each process imports torch once and is given one unit after the other, the longest known
first. What a unit that failed says is printed when it is done. A process that dies fails its unit, and another one
takes its place. Units that fork the process they run in get a new one.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from typing import Any

ROOT = Path(__file__).parent
PROCESSES = 2
ALONE = ("checkpoint/test_crash.py",)
NOTHING_THERE = 5  # pytest's exit code where it finds no test
FIRST = (
    "parity/test_curves.py", "parity/test_gloo.py", "parity/test_pipelines.py", "checkpoint/test_matrix.py",
    "train/test_kills.py", "parity/test_hangs.py", "parity/test_faults.py", "plan/test_auto.py",
    "parity/test_loop.py", "parity/test_experts.py", "plan/test_constraints.py", "plan/joint/test_planner.py",
)  # fmt: skip


def units(within: list[Path]) -> list[str]:
    """Files of tests, relative to this folder, in the order in which they are run."""
    files = [file for path in within for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    results = [str(file.resolve().relative_to(ROOT)) for file in files]
    return sorted(results, key=lambda unit: FIRST.index(unit) if unit in FIRST else len(FIRST))


class Worker:
    """A process that runs units, and what it said of the last one."""

    def __init__(self, options: list[str]) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._output = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, unit: str) -> tuple[int, float, str]:
        """The exit code of pytest, the seconds it took, and all that was printed."""
        begin = time.monotonic()
        if unit in ALONE:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", "tests.side_by_side", "--serve", *self._options]
            self._process = subprocess.Popen(
                command, cwd=ROOT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._output, text=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(unit + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code, self._process = self._process.wait() or 1, None
        else:
            code = json.loads(answer)
        self._output.seek(0)
        message = self._output.read()
        self._output.seek(0)
        self._output.truncate()
        return code, time.monotonic() - begin, message

    def close(self) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            self._process.stdin.close()
            self._process.wait()
            self._process = None


def serve(options: list[str]) -> None:
    """The life of a worker: units come in by stdin, exit codes go out by stdout, all that is printed to stderr."""
    import pytest

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    units = os.fdopen(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for unit in units:
        before = dict(os.environ)
        code = pytest.main(["-p", "no:cacheprovider", str(ROOT / unit.strip()), *options])
        os.environ.clear()
        os.environ.update(before)
        gc.collect()
        gc.freeze()  # what a unit has imported stays: no collection has to walk it
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(json.dumps(int(code)) + "\n")
        answers.flush()


def drained(queue: SimpleQueue[str]) -> Iterator[str]:
    while True:
        try:
            yield queue.get_nowait()
        except Empty:
            return


def main(arguments: list[str]) -> int:
    within = [Path(argument) for argument in arguments if Path(argument).exists()]
    options = [argument for argument in arguments if not Path(argument).exists()]
    begin, failed, lock = time.monotonic(), list[str](), Lock()
    waiting: SimpleQueue[str] = SimpleQueue()
    for unit in units(within or [ROOT]):
        waiting.put(unit)

    def work() -> None:
        worker = Worker(options)
        for unit in drained(waiting):
            code, seconds, message = worker.run(unit)
            last = message.strip().splitlines()[-1] if message.strip() else ""
            with lock:
                fine = code in (0, NOTHING_THERE)
                if not fine:
                    failed.append(unit)
                    print(message)
                print(f"{'passed' if fine else 'FAILED'} {unit} in {seconds:.0f} s: {last}", flush=True)
        worker.close()

    threads: list[Any] = [Thread(target=work) for _ in range(PROCESSES)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    minutes = (time.monotonic() - begin) / 60
    print(f"{'failed: ' + ', '.join(failed) if failed else 'all passed'}, {minutes:.1f} minutes")
    return 1 if failed else 0


if __name__ == "__main__":
    if "--serve" in sys.argv:
        sys.argv.remove("--serve")
        serve(sys.argv[1:])
    else:
        sys.exit(main(sys.argv[1:]))

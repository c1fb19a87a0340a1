"""Runs the tests in two processes, one for each core: `python -m tests.side_by_side [paths] [options of pytest]`.

A unit is a file of tests. Each process imports torch once and is given one unit after the other. One begins with
the units that start processes themselves and wait for each other most of the time, the other with the rest, which
need a core; so they stay out of each other's way. What a unit that failed says is printed when it is done. A process
that dies fails its unit, and another one takes its place. Units that fork the process they run in get a new one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from threading import Lock, Thread

ROOT = Path(__file__).parent
ALONE = ("checkpoint/test_crash.py",)
NOTHING_THERE = 5  # pytest's exit code where it finds no test
STARTS = ("pools", "run_processes", "forkserver", "torchrun", "verify(")  # words of a file whose tests start processes


def units(within: list[Path]) -> list[str]:
    """Files of tests, relative to this folder: first those that start processes, then the others."""
    files = [file for path in within for file in ([path] if path.is_file() else sorted(path.rglob("test_*.py")))]
    many = [file for file in files if any(word in file.read_text() for word in STARTS)]
    return [str(file.resolve().relative_to(ROOT)) for file in (*many, *(file for file in files if file not in many))]


class Worker:
    """A process that runs units, and what it said of the last one."""

    def __init__(self, options: list[str]) -> None:
        self._options = options
        self._process: subprocess.Popen[str] | None = None
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115

    def run(self, unit: str) -> tuple[int, float, str]:
        """The exit code of pytest, the seconds it took, and all that was printed."""
        begin = time.monotonic()
        if unit in ALONE:
            self.close()
        if self._process is None:
            command = [sys.executable, "-m", "tests.side_by_side", "--serve", *self._options]
            self._process = subprocess.Popen(
                command, cwd=ROOT.parent, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True
            )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(unit + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            code, self._process = self._process.wait() or 1, None
        else:
            code = json.loads(answer)
        self._said.seek(0)
        said = self._said.read()
        self._said.seek(0)
        self._said.truncate()
        return code, time.monotonic() - begin, said

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
        sys.stdout.flush()
        sys.stderr.flush()
        answers.write(json.dumps(int(code)) + "\n")
        answers.flush()


def main(arguments: list[str]) -> int:
    within = [Path(given) for given in arguments if Path(given).exists()]
    options = [given for given in arguments if not Path(given).exists()]
    begin, failed, lock = time.monotonic(), list[str](), Lock()
    waiting = deque(units(within or [ROOT]))

    def next_one(take: Callable[[], str]) -> str | None:
        with lock:
            return take() if waiting else None

    def work(take: Callable[[], str]) -> None:
        worker = Worker(options)
        while unit := next_one(take):
            code, seconds, said = worker.run(unit)
            last = said.strip().splitlines()[-1] if said.strip() else ""
            with lock:
                fine = code in (0, NOTHING_THERE)
                if not fine:
                    failed.append(unit)
                    print(said)
                print(f"{'passed' if fine else 'FAILED'} {unit} in {seconds:.0f} s: {last}", flush=True)
        worker.close()

    threads = [Thread(target=work, args=(take,)) for take in (waiting.popleft, waiting.pop)]
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

"""Tries mutants: each is written into a scratch copy of the tree, and tests run on it in a fork.

The process that forks has imported torch and pytest and nothing of the package, so that a trial costs the second
that the package takes to be imported, and the tests. A test that fails is believed only if it passes without the
change: it is tried once on the unchanged tree, and left out from then on if it fails there too.

    scratch/0/src/shardwright/...   one copy for each fork that runs at a time; the working tree is never written to
    scratch/0/tests/...
"""

from __future__ import annotations

import compileall
import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

COPIED = ("src", "tests", "bench", "examples", "docs", "pyproject.toml", "README.md")
OPTIONS = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported")
NOTHING_THERE = 5  # pytest's exit code where it finds no test
GRACE = 30.0  # seconds that a trial may take longer than its tests


@dataclass(frozen=True, kw_only=True)
class Change:
    """What is tried: the text of a file, and the tests that should notice it, in their order."""

    name: str
    file: str  # below the root of the tree: "src/shardwright/rules/views.py"
    text: str
    tests: tuple[str, ...]  # below the root: "tests/rules/test_views.py", or one test of it, by pytest's id


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What became of a change: `caught`, `survived` or `timed out`, and by which test and error."""

    name: str
    outcome: str
    test: str = ""
    error: str = ""
    ran: tuple[str, ...] = ()  # the files of tests that were finished
    flaky: tuple[str, ...] = ()  # tests that fail without the change too
    seconds: float = 0.0


@dataclass
class Lab:
    """Scratch copies of a tree, and the forks that run in them."""

    tree: Path
    package: str  # the package that is changed, which no fork may inherit
    scratch: Path
    processes: int = 2
    each: float = 60.0  # seconds after which a trial begins no other file of tests
    one_test: float = 60.0  # seconds that one test may take
    sound: set[str] = field(default_factory=set)  # tests that pass without any change
    flaky: set[str] = field(default_factory=set)  # tests that fail without any change

    def run(
        self, changes: Iterable[Change], tell: Callable[[Verdict], None], deadline: float = float("inf")
    ) -> list[Verdict]:
        """Try changes, as many at a time as there are processes; begins no trial after the deadline."""
        self._copy()
        verdicts: list[Verdict] = []
        free, running, coming = list(range(self.processes)), dict[int, tuple[int, Change]](), iter(changes)
        try:
            while True:
                while free and time.monotonic() < deadline and (change := next(coming, None)) is not None:
                    at = free.pop()
                    running[self._fork(at, change)] = at, change
                if not running:
                    return verdicts
                pid, status = os.waitpid(-1, 0)
                at, change = running.pop(pid)
                free.append(at)
                if status:
                    raise RuntimeError(f"{change.name} could not be tried; what it printed is above")
                verdict = _read(self._home(at), change)
                self.sound.add(verdict.test)
                self.flaky.update(verdict.flaky)
                verdicts.append(verdict)
                tell(verdict)
        finally:
            for pid in running:
                os.kill(pid, signal.SIGTERM)

    def _home(self, at: int) -> Path:
        return self.scratch / str(at)

    def _copy(self) -> None:
        """The first copy is compiled, and the others are copies of it."""
        first = self._home(0)
        for at in range(self.processes):
            source = first if at else self.tree
            shutil.rmtree(self._home(at), ignore_errors=True)
            self._home(at).mkdir(parents=True)
            for name in COPIED:
                if (source / name).is_dir():
                    shutil.copytree(source / name, self._home(at) / name)
                elif (source / name).exists():
                    shutil.copy2(source / name, self._home(at) / name)
            if not at:
                compileall.compile_dir(first, quiet=2)

    def _fork(self, at: int, change: Change) -> int:
        """A supervisor of one trial: it outlives tests that hang or die."""
        sys.stdout.flush()
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
            _end_with(lambda: self._supervise(self._home(at), change))
        return pid

    def _supervise(self, home: Path, change: Change) -> None:
        begin, flaky = time.monotonic(), set(self.flaky)
        while True:
            with _changed(home / change.file, change.text):
                verdict = self._tested(home, change, flaky)
            if verdict.outcome == "survived" or verdict.test in self.sound or self._passes(home, change, verdict.test):
                break
            if not verdict.test or verdict.test in flaky:
                print((home / "output.txt").read_text())
                raise RuntimeError(f"{change.name}: the tests can't be run: {verdict.error}")
            flaky.add(verdict.test)  # it says nothing of this change
        _write(home, replace(verdict, flaky=tuple(flaky), seconds=time.monotonic() - begin))

    def _passes(self, home: Path, change: Change, test: str) -> bool:
        """Whether a test passes in the tree as it is; of a file that can't be imported, whether it can be."""
        plain = replace(change, name="unchanged", tests=(test,))
        return bool(test) and self._tested(home, plain, (), import_only="::" not in test).outcome == "survived"

    def _tested(self, home: Path, change: Change, flaky: Collection[str], import_only: bool = False) -> Verdict:
        for name in ("verdict.json", "running"):
            (home / name).unlink(missing_ok=True)
        begin = time.monotonic()
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)  # so that the tests' own processes end with it
            options = [*OPTIONS, "-o", f"timeout={self.one_test:g}", *(["--collect-only"] if import_only else [])]
            _end_with(lambda: _test(home, self.package, change, _Watch(home, flaky), options, begin + self.each))
        limit, ended = begin + self.each + self.one_test + GRACE, False
        try:
            while time.monotonic() < limit and not ended:
                time.sleep(0.05)
                ended = os.waitpid(pid, os.WNOHANG) != (0, 0)
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)
            if not ended:
                os.waitpid(pid, 0)
        return _read(home, change)


def _end_with(work: Callable[[], None]) -> NoReturn:
    """Do the work of a fork, and end it: nothing of the process that it was forked from may run in it."""
    code = 1
    try:
        work()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


@contextlib.contextmanager
def _changed(file: Path, text: str) -> Iterator[None]:
    """A file with another text for a while. Compiled files are told apart by time stamps, to the second."""
    before, stamp = file.read_text(encoding="utf-8"), file.stat().st_mtime
    file.write_text(text, encoding="utf-8")
    os.utime(file, (stamp - 1000, stamp - 1000))
    try:
        yield
    finally:
        file.write_text(before, encoding="utf-8")
        os.utime(file, (stamp, stamp))


def _write(home: Path, verdict: Verdict) -> None:
    (home / "verdict.json").write_text(json.dumps(vars(verdict)))


def _read(home: Path, change: Change) -> Verdict:
    """What a fork wrote; one that was ended before it could hung, or died, in the test that ran."""
    try:
        held = json.loads((home / "verdict.json").read_text())
    except FileNotFoundError:
        running = home / "running"
        test = running.read_text() if running.exists() else ""
        return Verdict(name=change.name, outcome="timed out", test=test, error="hung or died")
    return Verdict(**{name: tuple(value) if isinstance(value, list) else value for name, value in held.items()})


class _Watch:
    """A plugin of pytest that notes which test runs, and what the first one that failed raised."""

    def __init__(self, home: Path, flaky: Collection[str]) -> None:
        self.home, self.flaky, self.test, self.error = home, flaky, "", ""

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.flaky]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        (self.home / "running").write_text(nodeid)

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        if not self.test:
            said = " ".join(str(call.excinfo.value).split())[:160]
            self.test, self.error = node.nodeid, f"{call.excinfo.type.__name__}: {said}"


def _test(home: Path, package: str, change: Change, watch: _Watch, options: list[str], until: float) -> None:
    """Run the tests of a change, one file after the other, up to the first that fails, and write a verdict."""
    _settle(home, package)
    import pytest

    ran: list[str] = []
    for test in change.tests:
        if time.monotonic() > until and ran:
            break
        ended = int(pytest.main(["--rootdir", str(home), *options, test], plugins=[watch]))
        if ended not in (0, NOTHING_THERE):
            error = watch.error or f"pytest ended with {ended}"
            outcome = "timed out" if "Timeout" in error else "caught"
            _write(home, Verdict(name=change.name, outcome=outcome, test=watch.test or test, error=error, ran=(*ran,)))
            return
        ran.append(test)
    _write(home, Verdict(name=change.name, outcome="survived", ran=(*ran,)))


def _settle(home: Path, package: str) -> None:
    """Have this process, and all that it starts, use a scratch copy."""
    os.chdir(home)
    out = os.open(home / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.update(PYTHONPATH=f"{home / 'src'}:{home}", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] in ("tests", package)]:
        del sys.modules[name]
    sys.path[:0] = [str(home / "src"), str(home)]

"""Tries mutants: tests run on the package with one file changed, up to the first that fails.

    warm    in a fork of a process that has imported the package and the tests: the code of the file's functions is
            replaced. Seconds less, but processes that tests start, and what was computed at import, are as they were
    cold    in a new process, on a scratch copy of the tree with the file changed: what survived warm, and what is
            not in a function

A test that fails is believed only if it passes without the change. The working tree is never written to.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import shutil
import signal
import sys
import time
import traceback
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NoReturn

COPIED = ("src", "tests", "bench", "examples", "docs", "pyproject.toml", "README.md")
OPTIONS = ("-x", "--hypothesis-profile=mutants")
ALWAYS = ("-q", "-p", "no:cacheprovider", "-W", "ignore:Module already imported")
STOPPED, NOTHING_THERE = 2, 5  # pytest's exit codes where a plugin ends it, and where it finds no test


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


def snapshot(tree: Path, to: Path) -> Path:
    """A copy of what tests need of a tree."""
    to.mkdir(parents=True)
    for name in COPIED:
        if (tree / name).is_dir():
            shutil.copytree(tree / name, to / name)
        elif (tree / name).exists():
            shutil.copy2(tree / name, to / name)
    return to


@dataclass
class Lab:
    """A copy of a tree, and the processes in which tests run on changes of it."""

    tree: Path  # which nobody changes meanwhile
    scratch: Path
    processes: int = 2
    each: float = 60.0  # seconds after which a trial begins no other test
    one_test: float = 120.0  # seconds that one test may take
    grace: float = 30.0  # seconds that a trial may take longer than its tests
    warm: bool = False
    sound: set[str] = field(default_factory=set)  # tests that pass without any change
    flaky: set[str] = field(default_factory=set)  # tests that fail without any change

    def warm_up(self, tests: Sequence[str]) -> None:
        """Import the package and tests into this process."""
        _settle(self.tree)
        ended = _pytest(["--collect-only", "-qq", "--rootdir", str(self.tree), *_below(self.tree, tests)], None)
        if ended:
            raise RuntimeError(f"tests could not be imported: pytest ended with {ended}")
        self.warm = True
        gc.collect()
        gc.freeze()

    def run(
        self, changes: Iterable[Change], tell: Callable[[Verdict], None], deadline: float = float("inf")
    ) -> list[Verdict]:
        """Try changes, as many at a time as there are processes; begins no trial after the deadline."""
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that trials end, and what they wrote is removed
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
                os.waitpid(pid, 0)

    def _home(self, at: int) -> Path:
        return self.scratch / str(at)

    def _fork(self, at: int, change: Change) -> int:
        """A supervisor of one trial: it outlives tests that hang or die."""
        sys.stdout.flush()
        if not self._home(at).exists():
            snapshot(self.tree, self._home(at))
        pid = os.fork()
        if not pid:
            _end_with(lambda: self._supervise(self._home(at), change))
        return pid

    def _supervise(self, home: Path, change: Change) -> None:
        begin, flaky = time.monotonic(), set(self.flaky)
        for warm in (True, False) if self.warm else (False,):
            verdict = self._believed(home, change, flaky, warm)
            if verdict.outcome != "survived":
                break
        _write(home, replace(verdict, flaky=tuple(flaky), seconds=time.monotonic() - begin))

    def _believed(self, home: Path, change: Change, flaky: set[str], warm: bool) -> Verdict:
        """A verdict by a test that passes without the change."""
        while True:
            with contextlib.nullcontext() if warm else _changed(home / change.file, change.text):
                verdict = self._tested(home, change, flaky, warm)
            if verdict.outcome == "survived" or verdict.test in self.sound:
                return verdict
            if self._passes(home, change, verdict.test, warm):
                self.sound.add(verdict.test)
                return verdict
            if not verdict.test or verdict.test in flaky:
                print((home / "output.txt").read_text())
                raise RuntimeError(f"{change.name}: the tests can't be run: {verdict.error}")
            flaky.add(verdict.test)  # it says nothing of this change

    def _passes(self, home: Path, change: Change, test: str, warm: bool) -> bool:
        """Whether a test passes in the tree as it is; of a file that can't be imported, whether it can be."""
        plain = replace(change, name="unchanged", text="", tests=(test,))
        return bool(test) and self._tested(home, plain, (), warm, import_only="::" not in test).outcome == "survived"

    def _tested(
        self, home: Path, change: Change, flaky: Collection[str], warm: bool, import_only: bool = False
    ) -> Verdict:
        """The verdict of one run in a process of its own, which is ended when it takes too long."""
        for name in ("verdict.json", "running"):
            (home / name).unlink(missing_ok=True)
        begin = time.monotonic()
        options = [*OPTIONS, "-o", f"timeout={self.one_test:g}", *(["--collect-only"] if import_only else [])]
        order = {"flaky": list(flaky), "each": self.each, "options": options, "change": vars(change)}
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)  # so that the tests' own processes end with it
            if warm:
                _end_with(lambda: _test_warm(self.tree, home, order))
            (home / "order.json").write_text(json.dumps(order))
            os.execv(sys.executable, [sys.executable, __file__, str(home)])
        limit, ended = begin + self.each + self.one_test + self.grace, False
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
    """What a process wrote; one that was ended before it could hung, or died, in the test that ran."""
    try:
        document = json.loads((home / "verdict.json").read_text())
    except FileNotFoundError:
        running = home / "running"
        test = running.read_text() if running.exists() else ""
        return Verdict(name=change.name, outcome="timed out", test=test, error="hung or died")
    return Verdict(**{name: tuple(value) if isinstance(value, list) else value for name, value in document.items()})


# -- in the process that runs the tests ----------------------------------------------------------


class _Watch:
    """A plugin of pytest that notes which test runs and what the first one that failed raised, and ends in time."""

    def __init__(self, home: Path, flaky: Collection[str], until: float) -> None:
        self.home, self.flaky, self.until, self.test, self.error = home, flaky, until, "", ""
        self.late = False

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.flaky]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        (self.home / "running").write_text(nodeid)

    def pytest_runtest_teardown(self, item: Any) -> None:
        if time.monotonic() > self.until:
            self.late, item.session.shouldstop = True, "time is up"

    def pytest_exception_interact(self, node: Any, call: Any) -> None:
        if not self.test:
            message = " ".join(str(call.excinfo.value).split())[:160]
            self.test, self.error = node.nodeid, f"{call.excinfo.type.__name__}: {message}"


def _test_warm(tree: Path, home: Path, order: dict[str, Any]) -> None:
    change = order["change"]
    _print_to(home / "output.txt")
    if change["text"] and not _swapped(tree, change["file"], change["text"]):
        _write(home, Verdict(name=change["name"], outcome="survived", error="it has to be tried cold"))
        return
    _test(tree, home, order)


def _test(tree: Path, home: Path, order: dict[str, Any]) -> None:
    """Run the tests of a change, one file after the other, up to the first that fails, and write a verdict."""
    change, ran = order["change"], list[str]()
    watch = _Watch(home, order["flaky"], time.monotonic() + order["each"])
    for test in change["tests"]:
        ended = _pytest(["--rootdir", str(tree), *order["options"], *_below(tree, [test])], watch)
        if watch.test or ended not in (0, STOPPED, NOTHING_THERE):
            error = watch.error or f"pytest ended with {ended}"
            outcome = "timed out" if "Timeout" in error else "caught"
            reported = Verdict(name=change["name"], outcome=outcome, test=watch.test or test, error=error, ran=(*ran,))
            _write(home, reported)
            return
        if watch.late:
            break
        ran.append(test)
    _write(home, Verdict(name=change["name"], outcome="survived", ran=(*ran,)))


def _below(tree: Path, tests: Iterable[str]) -> list[str]:
    return [str(tree / test) for test in tests]


def _pytest(arguments: Sequence[str], plugin: object) -> int:
    import pytest
    from hypothesis import Phase, settings

    settings.register_profile("mutants", deadline=None, phases=[Phase.explicit, Phase.generate])  # nothing is shrunk
    return int(pytest.main([*ALWAYS, *arguments], plugins=[] if plugin is None else [plugin]))


def _print_to(file: Path) -> None:
    out = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _settle(tree: Path) -> None:
    """Have this process, and all that it starts, use a tree."""
    os.chdir(tree)
    os.environ.update(PYTHONPATH=f"{tree / 'src'}:{tree}", PYTHONDONTWRITEBYTECODE="1", OMP_NUM_THREADS="1")
    sys.dont_write_bytecode = True
    for name in [name for name in sys.modules if name.split(".")[0] == "tests"]:
        del sys.modules[name]
    sys.path[:0] = [str(tree / "src"), str(tree)]


def _swapped(tree: Path, file: str, text: str) -> bool:
    """Give the functions of a loaded module the code that they have in another text, if that is all that differs."""
    path = str(tree / file)
    before, after = (compile(item, path, "exec") for item in ((tree / file).read_text(encoding="utf-8"), text))
    old, new = _functions(before), _functions(after)
    if _outside(before) != _outside(after) or old.keys() != new.keys():
        return False
    if any([code.co_freevars for code in old[name]] != [code.co_freevars for code in new[name]] for name in new):
        return False
    gc.unfreeze()  # what is frozen is not listed
    every = gc.get_objects()
    gc.freeze()
    for value in every:
        if isinstance(value, types.FunctionType) and value.__code__.co_filename == path:
            codes = new.get(value.__code__.co_qualname, [])
            if len(codes) != 1:  # overloads and lambdas, which have no name of their own
                if value.__code__ not in codes:
                    return False
                continue
            value.__code__ = codes[0]
    return True


def _functions(code: types.CodeType) -> dict[str, list[types.CodeType]]:
    """All functions that some code makes, by their qualified names."""
    by_name: dict[str, list[types.CodeType]] = {}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            if constant.co_flags & 2:  # CO_NEWLOCALS: a function, not a class
                by_name.setdefault(constant.co_qualname, []).append(constant)
            for name, codes in _functions(constant).items():
                by_name.setdefault(name, []).extend(codes)
    return by_name


def _outside(code: types.CodeType) -> list[object]:
    """What code does outside of functions: its instructions and what they use, classes included."""
    inner = [
        constant for constant in code.co_consts if isinstance(constant, types.CodeType) and not constant.co_flags & 2
    ]
    plain = [repr(constant) for constant in code.co_consts if not isinstance(constant, types.CodeType)]
    return [code.co_code, code.co_names, plain, *(_outside(value) for value in inner)]


def _main(home: Path) -> None:
    """A cold trial: this file run as a script."""
    order = json.loads((home / "order.json").read_text())
    _print_to(home / "output.txt")
    _settle(home)
    _test(home, home, order)


if __name__ == "__main__":
    sys.path.pop(0)  # the folder of this script
    _main(Path(sys.argv[1]))

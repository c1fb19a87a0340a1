"""Runs mutations in processes with limited memory, and tells what came out of each."""

from __future__ import annotations

import contextlib
import io
import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from shardwright.errors import ShardwrightError

from .kinds import KINDS, copied

MEMORY = 2**30  # bytes beyond what the process has when it begins
SECONDS = 2.0  # of processor time, for one file


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What became of a mutation: `fault` is "" if it was read, or refused by an error of ours."""

    kind: str
    seed: int
    seconds: float
    refused: bool
    fault: str = ""


def try_files(kind: str, seeds: Sequence[int], answers: object) -> None:
    """Mutate, read, and report; in a process of its own."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as place:
        good = Path(place) / "good"
        good.mkdir()
        KINDS[kind].make(good)
        KINDS[kind].use(copied(good, Path(place) / "try"))  # imports what it needs, and must be fine
        for seed in seeds:
            answers.put(_try(kind, seed, good, Path(place) / "try"))  # type: ignore[attr-defined]


def _try(kind: str, seed: int, good: Path, place: Path) -> Outcome:
    KINDS[kind].change(copied(good, place), Random(seed))
    fault, refused, start = "", False, time.process_time()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            KINDS[kind].use(place)
        except ShardwrightError as error:
            refused = True
            fault = f"no message: {error!r}" if len(str(error)) < 10 else ""
            fault = f"a message of {len(str(error))} characters" if len(str(error)) > 50_000 else fault
        except BaseException:
            fault = "".join(traceback.format_exc(limit=-3))
    seconds = time.process_time() - start
    if seconds > SECONDS and not fault:
        fault = f"it took {seconds:.1f} s"
    return Outcome(kind=kind, seed=seed, seconds=seconds, refused=refused, fault=fault)


def try_all(kind: str, seeds: Sequence[int], patience: float = 600.0) -> list[Outcome]:
    """The outcomes of a kind. A process that dies has its next seed as the fault."""
    context = multiprocessing.get_context("fork")
    answers = context.Queue()
    process = context.Process(target=try_files, args=(kind, seeds, answers))
    process.start()
    outcomes: list[Outcome] = []
    deadline = time.monotonic() + patience
    while len(outcomes) < len(seeds) and time.monotonic() < deadline:
        with contextlib.suppress(Exception):
            outcomes.append(answers.get(timeout=1.0))
            continue
        if not process.is_alive() and answers.empty():
            break
    process.kill()
    process.join()
    if len(outcomes) < len(seeds):
        seed = seeds[len(outcomes)]
        outcomes.append(Outcome(kind=kind, seed=seed, seconds=0.0, refused=False, fault="the process died or hung"))
    return outcomes

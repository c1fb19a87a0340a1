"""Ranks with the environment that torchrun gives them, forked from a server that has imported torch.

A script that torchrun starts spends most of its time on imports. Tests that really start torchrun: of a killed run
(train/test_kills.py) and of an example (examples/test_examples.py).
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended: its exit code, all that it wrote, and when that was."""

    code: int
    text: str
    seconds: float  # after the first


def launch(size: int, script: Callable[..., Any], *args: Any, folder: Path, timeout: float = 120.0) -> list[Ended]:
    """Call `script(*args)` on every rank, which has to join the others by itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    files = [folder / f"rank{rank}.txt" for rank in range(size)]
    ranks = [
        context.Process(target=_run, args=(variables(rank, size, store.port), str(file), script, args))
        for rank, file in enumerate(files)
    ]
    for process in ranks:
        process.start()
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while len(ended) < size and time.monotonic() < deadline:
        ended |= {at: time.monotonic() for at, rank in enumerate(ranks) if at not in ended and not rank.is_alive()}
        time.sleep(0.05)
    for process in ranks:
        process.kill()
        process.join()
    first = min(ended.values(), default=0.0)
    return [
        Ended(code=process.exitcode or 0, text=file.read_text(), seconds=ended.get(rank, float("inf")) - first)
        for rank, (process, file) in enumerate(zip(ranks, files, strict=True))
    ]


def variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What torchrun tells a rank."""
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True",
        "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1",
    }  # fmt: skip


def _run(environment: dict[str, str], file: str, script: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """As Python runs a script, to its very end."""
    os.environ.update(environment)
    torch.set_num_threads(1)
    out = os.open(file, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1)
    os.dup2(out, 2)
    code = 0
    try:
        script(*args)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = 1
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

"""Many ranks on one machine, for tests: those of `sw.verify` and `sw.launch`, with limits for small work.

`run_ranks` runs a function on n threads with real data: a few milliseconds, but one interpreter, so that ranks share
the default random generator, and no send and receive. Use generators, or make the data before.

`run_processes` runs a function on n gloo processes, forked from a clean server that has imported what most tests
need; the function and its arguments must be picklable (a function of a module).
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from multiprocessing import forkserver
from typing import Any

from shardwright.runtime import launch
from shardwright.verify import ranks


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call `fn(rank, *args)` on n threads that communicate, and return what they return."""
    return ranks.run_threads(n, fn, *args, timeout=timeout)


def run_processes(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call `fn(rank, *args)` on n gloo processes, and return what they return."""
    multiprocessing.get_context("forkserver").set_forkserver_preload(["tests.preload"])
    forkserver.ensure_running()  # with what is preloaded, before the ranks ask for less
    return launch.run_processes(n, fn, *args, timeout=timeout)

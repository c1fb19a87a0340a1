"""Start many ranks from one process, so that a plan can be tried without torchrun.

    method      a rank is          good for
    ---------   ----------------   ---------------------------------------------------
    threads     a thread           small models; starts in milliseconds, pickles nothing
    processes   a gloo process     closest to a real run (`runtime/launch.py`); the work must be picklable

Both call `work(rank, *args)` with torch.distributed initialised, return the results in rank
order, raise the error of the first failing rank, and end instead of hanging. Threads share
one interpreter: ranks share torch's default generator, and there is no send and receive.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from ..errors import RankError
from ..runtime.launch import run_processes

Method = Literal["threads", "processes"]


def run(method: Method, size: int, work: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Call `work(rank, *args)` on `size` ranks, and return their results."""
    start = run_threads if method == "threads" else run_processes
    return start(size, work, *args, timeout=timeout)


def run_threads(size: int, work: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """The ranks as threads of this process."""
    from torch.testing._internal.distributed import multi_threaded_pg as threaded

    results: list[Any] = [None] * size
    errors: list[tuple[int, BaseException]] = []
    store = HashStore()
    wait_for = timedelta(seconds=timeout)

    def run(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=size, store=store, timeout=wait_for)
            try:
                results[rank] = work(rank, *args)
            finally:
                dist.destroy_process_group()
        except SystemExit:  # how the threaded group stops ranks that wait for a failed one
            errors.append((rank, RankError(f"rank {rank} waited for a rank that failed")))
        except BaseException as error:
            errors.append((rank, error))

    _isolate(True)
    threaded._install_threaded_pg()  # type: ignore[no-untyped-call]
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    try:
        for thread in threads:
            thread.start()
        _join(threads, errors, timeout, threaded.ProcessLocalGroup)
    finally:
        threaded.ProcessLocalGroup.reset()  # type: ignore[no-untyped-call]
        threaded._uninstall_threaded_pg()  # type: ignore[no-untyped-call]
        _isolate(False)
    if errors:
        rank, error = next((pair for pair in errors if not isinstance(pair[1], RankError)), errors[0])
        error.add_note(f"(on rank {rank} of {size})")
        raise error
    return results


def _isolate(on: bool) -> None:
    torch._C._distributed_c10d._set_thread_isolation_mode(on)  # type: ignore[attr-defined]


def _join(threads: list[threading.Thread], errors: list[Any], timeout: float, local: Any) -> None:
    """Wait for the threads; after a failure or the timeout, wake those that wait in a collective."""
    deadline = time.monotonic() + timeout
    ending = False
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.01)
        if not ending and (errors or time.monotonic() > deadline):
            ending, deadline = True, time.monotonic() + 5
            if not errors:
                stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
                errors.append((stuck[0] if stuck else 0, RankError(f"ranks {stuck} did not end within {timeout} s")))
        if ending:
            _wake(local)
            if time.monotonic() > deadline:
                return


def _wake(local: Any) -> None:
    local._terminate.set()
    for collective in list(local._cur_coll_on_pgs.values()):
        for condition in (collective._start_cond, collective._done_cond):
            if condition.acquire(timeout=0.1):
                condition.notify_all()
                condition.release()

"""Many ranks on one machine, for tests.

`run_ranks` runs a function on n threads with real data and torch's threaded process
group: a few milliseconds, but one interpreter, so that ranks share the default random
generator, and no send and receive. Use generators, or make the data before.

`run_processes` runs a function on n real gloo processes. They are forked from a clean
server that has imported torch, so that neither threads nor autograd of the test process
leak into them; the function and its arguments must be picklable (a function of a module).

Both call `fn(rank, *args)` with torch.distributed initialised, return the results in rank
order, raise what the first failing rank raised, and fail instead of hanging.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded


class RankFailed(AssertionError):
    """A rank of a test raised, died or hung."""


def run_ranks(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call `fn(rank, *args)` on n threads that communicate, and return what they return."""
    results: list[Any] = [None] * n
    errors: list[tuple[int, BaseException]] = []
    store = dist.HashStore()

    def run(rank: int) -> None:
        try:
            dist.init_process_group(
                "threaded", rank=rank, world_size=n, store=store, timeout=timedelta(seconds=timeout)
            )
            try:
                results[rank] = fn(rank, *args)
            finally:
                dist.destroy_process_group()
        except SystemExit:  # how the threaded group ends the ranks that wait for a failed one
            errors.append((rank, RankFailed(f"rank {rank} waited for a rank that failed")))
        except BaseException as error:
            errors.append((rank, error))

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(n)]
    try:
        for thread in threads:
            thread.start()
        alive = _join(threads, errors, timeout)
    finally:
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    if errors:
        rank, error = errors[0]
        error.add_note(f"(on rank {rank} of {n})")
        raise error
    if alive:
        raise RankFailed(f"ranks {alive} of {n} did not end within {timeout} s")
    return results


def _join(threads: list[threading.Thread], errors: list[Any], timeout: float) -> list[int]:
    """Wait for the threads; once one has failed or time is up, wake those that wait in a collective."""
    deadline = time.monotonic() + timeout
    ending = False
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(0.001 if not errors else 0.02)
        if not ending and (errors or time.monotonic() > deadline):
            ending, deadline = True, time.monotonic() + 5
            if not errors:
                stuck = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
                errors.append((stuck[0] if stuck else 0, RankFailed(f"ranks {stuck} did not end within {timeout} s")))
        if ending:
            _wake()
            if time.monotonic() > deadline:
                break
    return [rank for rank, thread in enumerate(threads) if thread.is_alive()]


def _wake() -> None:
    threaded.ProcessLocalGroup._terminate.set()
    for collective in list(threaded.ProcessLocalGroup._cur_coll_on_pgs.values()):
        for condition in (collective._start_cond, collective._done_cond):
            if condition.acquire(timeout=0.1):
                condition.notify_all()
                condition.release()


def run_processes(n: int, fn: Callable[..., Any], *args: Any, timeout: float = 60) -> list[Any]:
    """Call `fn(rank, *args)` on n gloo processes, and return what they return."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = pickle.dumps((fn, args))
    processes, connections = [], []
    try:
        for rank in range(n):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, call, rank, n, store.port, timeout), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        return _collect(connections, timeout)
    finally:
        for process in processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
        for connection in connections:
            connection.close()


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(connections)
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"ranks {sorted(waiting.values())} of {len(connections)} did not end within {timeout} s")
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[call-overload]
            try:
                fine, result = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankFailed(f"rank {rank} of {len(connections)} died without an error") from None
            if not fine:
                error, text = result
                if error is None:
                    raise RankFailed(f"rank {rank} of {len(connections)} failed:\n{text}")
                error.add_note(f"(on rank {rank} of {len(connections)})\n{text}")
                raise error
            results[rank] = result
    return results


def _child(connection: Connection, call: bytes, rank: int, size: int, port: int, timeout: float) -> None:
    try:
        torch.set_num_threads(1)
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size), OMP_NUM_THREADS="1")
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        wait_for = timedelta(seconds=timeout)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait_for)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait_for)
        fn, args = pickle.loads(call)
        connection.send_bytes(pickle.dumps((True, fn(rank, *args))))
        dist.destroy_process_group()
    except BaseException as error:
        connection.send_bytes(_failure(error))
        os._exit(1)


def _failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        sent = pickle.dumps((False, (error, text)))
        pickle.loads(sent)
    except Exception:
        return pickle.dumps((False, (None, text)))
    return sent

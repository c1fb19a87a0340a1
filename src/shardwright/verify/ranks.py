"""Start many ranks from one process, so that a plan can be tried without torchrun.

    method      a rank is          good for
    ---------   ----------------   ---------------------------------------------------
    threads     a thread           small models; starts in milliseconds, pickles nothing
    processes   a gloo process     closest to a real run; the work must be picklable

Both call `work(rank, *args)` with torch.distributed initialised, return the results in rank
order, raise the error of the first failing rank, and end instead of hanging. Threads share
one interpreter: ranks share torch's default generator, and there is no send and receive.
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
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from ..errors import RankError

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


def run_processes(size: int, work: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """The ranks as gloo processes, forked from a clean forkserver that has imported torch."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed"])
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    call = _pickled(work, args)
    processes, connections = [], []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_child, args=(theirs, call, rank, size, store.port, timeout), daemon=True)
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


def _pickled(work: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    try:
        return pickle.dumps((work, args))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise RankError(
            f'method="processes" sends the model to other processes, and it can\'t be pickled ({error}); '
            'use method="threads", or start the script with torchrun'
        ) from error


def _collect(connections: list[Connection], timeout: float) -> list[Any]:
    results: list[Any] = [None] * len(connections)
    waiting: dict[Any, int] = dict(zip(connections, range(len(connections)), strict=True))
    deadline = time.monotonic() + timeout
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankError(f"ranks {sorted(waiting.values())} of {len(connections)} did not end within {timeout} s")
        for connection in ready:
            rank = waiting.pop(connection)
            try:
                fine, result = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise RankError(f"rank {rank} of {len(connections)} died without an error") from None
            if not fine:
                error, text = result
                if error is None:
                    raise RankError(f"rank {rank} of {len(connections)} failed:\n{text}")
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
        store = TCPStore("127.0.0.1", port, is_master=False, timeout=wait_for)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait_for)
        work, args = pickle.loads(call)
        connection.send_bytes(pickle.dumps((True, work(rank, *args))))
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

"""Start ranks as processes of this machine, and call a function on each: `sw.launch`, where there is no torchrun.

    the caller                      forkserver                 a rank
    ─────────────────────────────   ────────────────────────   ───────────────────────────────────────
    pickles the function by value   has imported torch, and
    hosts the store, on a port      never ran anything
    that the system chooses    ───► forks               ───►   joins the others (`world.join`)
                                                               unpickles the function and calls it
    raises the first error     ◄────────────── a pipe ──────   result, or error with its traceback

A function of a script or of a notebook cell belongs to `__main__`, which a new process does not have. It is sent by
value (cloudpickle), with what it reads of `__main__`, so that ranks don't run the script again: it needs no
`if __name__ == "__main__"`. A fork of the caller would need no pickle, but hangs or fails in a process that has run
backward, OpenMP or a GPU, as a notebook has.
"""

from __future__ import annotations

import importlib
import io
import linecache
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Literal

import cloudpickle
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from shardwright.errors import InputError, RankError

from . import accelerator, world
from .agent import end_with
from .faults.failure import is_secondary_failure

Returns = Literal["first", "all"]
HOST = "127.0.0.1"
PATIENCE = 2.0  # seconds for the other ranks to say what failed first, and then to end


def launch(
    fn: Callable[..., Any], *args: Any, ranks: int, device: str | None = None, returns: Returns = "first",
    timeout: float | None = None,
) -> Any:  # fmt: skip
    """Call `fn(*args)` on `ranks` processes of this machine, as torchrun would, and return what rank 0 returns.

        losses = sw.launch(train, "llama", ranks=2)

    fn        of a module, a script or a notebook cell; torch.distributed is initialised when it is called
    device    "cuda", "cpu", ...: of which each rank takes one; by default the accelerator, if there is one
    returns   "all": a list of what each rank returns
    timeout   seconds for a collective to wait, and for all of `fn`; by default 600 for a collective and no end for `fn`

    An error of a rank is raised here, once, with its message and the rank's traceback; the other ranks are ended.
    Arguments and results are copied. Ranks start with torch's default settings and without what `fn` does not refer to.
    """
    world.refuse_inside("sw.launch")
    kind = device or accelerator.kind()
    most = accelerator.count_of(kind)
    if ranks < 1 or (most is not None and ranks > most):
        there = f", and there are {most} devices of type {kind}" if most is not None else ""
        raise InputError(f'ranks={ranks}{there}; start at least one, or pass device="cpu" for more ranks than devices')
    results = _run(ranks, _Call.of(fn, args, keep=returns), kind, timeout)
    return results if returns == "all" else results[0]


def run_processes(size: int, work: Callable[..., Any], *args: Any, timeout: float = 600.0) -> list[Any]:
    """Call `work(rank, *args)` on gloo processes, whatever devices there are, and return all results."""
    return _run(size, _Call.of(work, args, pass_rank=True), "cpu", timeout)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What every rank does, ready to be sent."""

    work: bytes  # the function and its arguments, pickled by value
    environment: Mapping[str, str]
    sources: Mapping[str, Any]  # of code that is in no file, such as notebook cells: for source lines in messages
    caller: int  # the process
    start_method: str | None  # that it has set for its processes
    pass_rank: bool
    keep: Returns

    @staticmethod
    def of(
        work: Callable[..., Any], args: tuple[Any, ...], *, pass_rank: bool = False, keep: Returns = "all"
    ) -> _Call:  # fmt: skip
        try:
            pickled = _pickled((work, args))
        except Exception as error:  # whatever a __reduce__ raises
            raise RankError(
                f"ranks are other processes, and {getattr(work, '__name__', work)}, its arguments or what it refers to "
                f"can't be pickled ({type(error).__name__}: {error}); make it inside of the function, or start the "
                'script with torchrun (verify: use method="threads")'
            ) from error
        sources = {name: entry for name, entry in linecache.cache.items() if not os.path.exists(name)}
        return _Call(
            work=pickled, environment=dict(os.environ), sources=sources, caller=os.getpid(),
            start_method=multiprocessing.get_start_method(allow_none=True), pass_rank=pass_rank, keep=keep,
        )  # fmt: skip


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]
    """Functions by value, and modules by name: also those of a class of their own, as torch and transformers have."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, ModuleType) and value.__name__ in sys.modules:
            return importlib.import_module, (value.__name__,)
        return super().reducer_override(value)


def _pickled(value: Any) -> bytes:
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def _run(size: int, call: _Call, device: str, timeout: float | None) -> list[Any]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "shardwright.train"])  # which imports most of it
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    processes: list[BaseProcess] = []
    connections: list[Connection] = []
    try:
        for rank in range(size):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(theirs, call, rank, size, store.port, device, timeout))
            with _no_main():
                process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        results = _collect(connections, processes, timeout)
        _end(processes, PATIENCE)
        return results
    finally:
        _end(processes, 0.0)
        for connection in connections:
            connection.close()


def _end(processes: list[BaseProcess], patience: float) -> None:
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


@contextmanager
def _no_main() -> Iterator[None]:
    """Without this, multiprocessing has each process run the caller's script again, to have its functions."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main


# -- what comes back -----------------------------------------------------------------------------


def _collect(connections: list[Connection], processes: list[BaseProcess], timeout: float | None) -> list[Any]:
    """The results of all ranks; or the error of the first rank that failed by itself, not because another did."""
    size = len(connections)
    results: list[Any] = [None] * size
    failures: list[BaseException] = []
    waiting: dict[Any, int] = dict(zip(connections, range(size), strict=True))
    deadline = math.inf if timeout is None else time.monotonic() + timeout
    while waiting and all(map(_may_be_secondary, failures)):
        left = max(0.0, deadline - time.monotonic())
        ready: list[Any] = wait(list(waiting), timeout=None if left == math.inf else left)
        for connection in ready:
            rank = waiting.pop(connection)
            fine, result = _receive(connection, processes[rank], f"rank {rank} of {size}")
            if fine:
                results[rank] = result
            else:
                failures.append(result)
                deadline = min(deadline, time.monotonic() + PATIENCE)
        if not ready and not failures:
            raise RankError(f"ranks {sorted(waiting.values())} of {size} did not end within {timeout} s")
        if not ready:
            break
    if failures:
        raise next((error for error in failures if not _may_be_secondary(error)), failures[0])
    return results


def _may_be_secondary(error: BaseException) -> bool:
    return is_secondary_failure(error) or isinstance(error, RankError)


def _receive(connection: Connection, process: BaseProcess, name: str) -> tuple[bool, Any]:
    """Whether a rank succeeded, and its result or its error."""
    try:
        fine, result = pickle.loads(connection.recv_bytes())
    except EOFError:
        process.join(PATIENCE)
        return False, RankError(f"{name} died without an error (exit code {process.exitcode}; -9: killed)")
    if fine:
        return True, result
    error, text = result
    if error is None:
        return False, RankError(f"{name} failed:\n{text}")
    error.add_note(f"(on {name})\n{text}")
    return False, error


# -- in the process of a rank --------------------------------------------------------------------


def _rank(
    connection: Connection, call: _Call, rank: int, size: int, port: int, device: str, timeout: float | None
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal interrupts all processes: the caller ends the ranks
    os.environ.clear()
    os.environ.update(call.environment)
    os.environ.update(world.variables_of(rank, size, HOST, port))
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    linecache.cache.update(call.sources)
    multiprocessing.set_start_method(call.start_method, force=True)  # of loader workers, as under torchrun
    end_with(call.caller)
    try:
        world.join(TCPStore(HOST, port, is_master=False), rank, size, device, timeout)
        work, args = pickle.loads(call.work)
        result = work(rank, *args) if call.pass_rank else work(*args)
        connection.send_bytes(_pickled((True, result if call.keep == "all" or rank == 0 else None)))
        dist.destroy_process_group()
    except BaseException as error:
        exited = isinstance(error, SystemExit)
        connection.send_bytes(_pickled_failure(RankError(f"sys.exit({error})") if exited else error))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _pickled_failure(error: BaseException) -> bytes:
    text = "".join(traceback.format_exception(error))
    try:
        pickled = _pickled((False, (error, text)))
        pickle.loads(pickled)
    except Exception:  # an error that can't be made again from its arguments
        return pickle.dumps((False, (None, text)))
    return pickled

"""Gloo processes that stay: started once, given one job after another.

Starting a process and importing torch and transformers takes longer than most jobs. A job
is `fn(rank, *args)`, called on every rank with torch.distributed initialised. A job that
raises, hangs or dies ends the pool's processes, since the ranks no longer stand at the same
place; the next job starts new ones.
"""

from __future__ import annotations

import io
import multiprocessing
import os
import pickle
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from shardwright.errors import RankError
from shardwright.runtime.world import variables_of
from tests.captures import keep_captures

START = 120.0  # seconds that processes may take to start, on a busy machine
GRACE = 30.0  # seconds in which other ranks may say what they saw of a failure


class Pool:
    """Processes of one world size. `run` gives a job to all of them."""

    def __init__(self, size: int, patience: float | None = None, prepare: Callable[[int], str] | None = None) -> None:
        """`prepare(rank)` runs first in each process, and returns the backend to join with (gloo without it)."""
        self.size = size
        self._prepare = prepare
        self._patience = patience  # the timeout of the process group, if it is not that of the first job
        self._members: list[tuple[Any, Connection]] = []

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[Any]:
        """What every rank returned, in their order; or the error of the first rank that failed by itself."""
        answers = self.try_run(fn, *args, timeout=timeout)
        failed = [(rank, answer[1]) for rank, answer in enumerate(answers) if not answer[0]]
        if failed:
            rank, (error, text) = min(failed, key=lambda value: _is_echo(value[1][1]))
            message = f"rank {rank} of {self.size} failed:\n{text}"
            if error is None:
                raise RankError(message)
            error.add_note(message)
            raise error
        return [answer[1] for answer in answers]

    def try_run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0) -> list[tuple[bool, Any]]:
        """For every rank (True, result) or (False, (error, text)); never waits longer than `timeout`."""
        if not self._members:
            self._start(timeout)
        for _, connection in self._members:
            connection.send_bytes(pickle.dumps((fn, args)))
        answers = self._collect(timeout)
        if not all(fine for fine, _ in answers):
            self.close()
        return answers

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._members:
            connection.close()
            process.join(2 if process.exitcode is None else 0)
            if process.is_alive():
                process.kill()
                process.join()
        self._members = []

    def _start(self, timeout: float) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests.preload"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # the system picks the port
        for rank in range(self.size):
            ours, theirs = context.Pipe()
            wanted = (theirs, rank, self.size, self._store.port, self._patience or timeout, self._prepare)
            process = context.Process(target=_serve, args=wanted, daemon=True)
            process.start()
            theirs.close()
            self._members.append((process, ours))
        ready = self._collect(START)
        if not all(fine for fine, _ in ready):
            self.close()
            raise RankError(f"the processes did not start: {ready}")

    def _collect(self, timeout: float) -> list[tuple[bool, Any]]:
        waiting: dict[Any, int] = {connection: rank for rank, (_, connection) in enumerate(self._members)}
        answers: list[tuple[bool, Any]] = [
            (False, (None, f"rank {rank} did not end within {timeout} s")) for rank in range(self.size)
        ]
        deadline = time.monotonic() + timeout
        while waiting:
            ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for connection in ready:
                rank = waiting.pop(connection)
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
                except (EOFError, ConnectionResetError):
                    answers[rank] = (False, (None, f"rank {rank} died without an error"))
                if not answers[rank][0]:
                    deadline = min(deadline, time.monotonic() + GRACE)
        return answers


def _is_echo(text: str) -> bool:
    """Whether a failure is only what a rank sees of another's."""
    return any(word in text for word in ("did not end within", "RankError", "Connection closed", "Connection reset"))


def _serve(
    connection: Connection, rank: int, size: int, port: int, timeout: float, prepare: Callable[[int], str] | None
) -> None:
    """The life of a process: join, then one job after another until the pool goes away."""
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    keep_captures()
    os.environ.update(variables_of(rank, size, "127.0.0.1", port) | {"OMP_NUM_THREADS": "1"})
    wait_for = timedelta(seconds=timeout)
    try:
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait_for)
        backend = "gloo" if prepare is None else prepare(rank)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=wait_for)
        connection.send_bytes(pickle.dumps((True, None)))
        while True:
            fn, args = pickle.loads(connection.recv_bytes())
            connection.send_bytes(pickle.dumps((True, fn(rank, *args))))
    except EOFError:
        os._exit(0)
    except BaseException as error:
        message = io.StringIO()
        with redirect_stderr(message):
            sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        connection.send_bytes(_failed(error, message.getvalue()))
        os._exit(1)


def _failed(error: BaseException, text: str) -> bytes:
    try:
        sent = pickle.dumps((False, (error, text)))
        pickle.loads(sent)
    except Exception:
        return pickle.dumps((False, (None, text)))
    return sent

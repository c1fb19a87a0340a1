"""When a rank fails, the others stop and say which one and why, instead of hanging.

Ranks report failures through the store of the default process group, apart from all
collectives. A small thread of each rank writes a heartbeat there once a second.

    what happens                      what the others see            what they raise
    -------------------------------   ----------------------------   --------------------------------
    a rank raises                     its connections close, its     RankError with the rank and its
                                      error is in the store          error
    a rank is killed                  its connections close, its     RankError that names the lost rank
                                      process is gone
    a rank raises and lives on, or    nothing: they wait             the thread prints that RankError and
    its machine is lost                                              ends the process, since a thread that
                                                                     waits in gloo can't be woken
    a rank sleeps, or skips a         nothing, until the process     RankError with the op, its line, who has
    collective                        group's timeout                entered it and where the others are
    ranks enter different             other sizes or kinds (gloo     RankError with the op and the line of each
    collectives as the same one       then aborts the process)

`Watch` is a context for code that may fail (`with watch: ...`), `report_failure` a decorator for
functions called by autograd. Neither costs anything as long as nothing fails. An error that all ranks
raise alike (a wrong batch) stops nobody else. Errors are stored by the number of the call of a
model, so that one that was caught does not matter later.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from types import FrameType, TracebackType
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from shardwright.errors import RankError

from .. import world
from ..collectives import shared_memory
from ..collectives.processes import machine_name
from . import flight_recorder
from .bounded_store import BoundedStore, LostStoreError
from .failure import BrokenGroupError, OutOfStepError, describe, is_secondary_failure
from .gloo_abort import on_gloo_abort
from .hang_report import Inquiry
from .heartbeats import BEAT, SILENCE, Beats, Heartbeats
from .uncaught import report_uncaught, write_error_file

PATIENCE = 60.0  # seconds in one collective after which a rank checks that all others are alive
LATE = 600.0  # seconds that ranks may be apart when a model is compiled
ANSWER = 20.0  # seconds within which the store answers
DOUBT = 6.0  # seconds in one collective after which a rank asks whether the others are in the same
GRACE = 5.0  # seconds for a waiting thread to fail by itself before its process is ended

P = ParamSpec("P")
T = TypeVar("T")

_RUNTIME = os.path.dirname(os.path.dirname(__file__))
_WAITING_IN = (os.path.dirname(dist.__file__), _RUNTIME, os.path.join("torch", "autograd"))


class Watch(AbstractContextManager[None]):
    """Reports this rank's failures to the others, and reads theirs."""

    def __init__(self, group: dist.ProcessGroup, store: Any, rank: int, size: int) -> None:
        self.of = ref(group)
        self.rank, self.size = rank, size
        self.call = 0  # number of model calls, equal on all ranks
        self.failed = -1  # the call in which this rank raised its own error
        limit = world.timeout_of(group)
        self._limit = LATE if limit is None else limit.total_seconds()
        self._store = BoundedStore(PrefixStore("shardwright/faults", store), min(ANSWER, max(self._limit, SILENCE)))
        self._heartbeats = Heartbeats(self._store, rank, size)
        self._thread_watched = threading.get_ident()
        self._notes = flight_recorder.begin()
        self._inquiry = Inquiry(self._store, rank, size, self._notes)
        self._prints = world.here().device.type != "cpu"  # NCCL's watchdog ends the process without our message
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._live, name="shardwright-faults", daemon=True)
        self._before, sys.excepthook = sys.excepthook, self._uncaught
        self._thread.start()
        atexit.register(self.end)
        on_gloo_abort(self._aborted)

    # -- the main thread ------------------------------------------------------------------

    def begin(self) -> None:
        """A call of a model begins."""
        self.call += 1
        self._thread_watched = threading.get_ident()

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            self.tell(error)

    def tell(self, error: BaseException) -> None:
        """Report an error of this rank to the others; or, if it is secondary, raise the primary one."""
        is_known = isinstance(error, RankError) and not isinstance(error, BrokenGroupError)
        if is_known or getattr(error, "reported", False):
            return
        error.reported = True  # type: ignore[attr-defined]
        if not is_secondary_failure(error):
            self.publish(self.rank, describe(error))
            self.failed = self.call
            return
        failure = self.desynchronized() if isinstance(error, OutOfStepError) else self.find()
        if failure is not None:
            raise RankError(failure) from error

    def publish(self, rank: int, text: str) -> None:
        """Store the failure of this call; the first one wins."""
        if self.failed != self.call or rank != self.rank:
            with suppress(LostStoreError):  # then nobody can read it
                self._store.compare_set(f"fault/{self.call}", "", json.dumps({"rank": rank, "text": text}))

    def find(self, wait: float = SILENCE + 3 * BEAT) -> str | None:
        """Which rank has failed in this call, and how; None if nothing is known after a while."""
        start = time.monotonic()
        beats: Beats = {}
        try:
            while True:
                reported = self._reported() or self._hung()
                lost = [] if reported else self._heartbeats.gone() or self._heartbeats.silent(beats)
                if reported or lost:
                    return reported or self._lost(lost)
                if time.monotonic() - start > wait:
                    return None
                time.sleep(0.1)
        except LostStoreError as error:
            return str(error)

    def desynchronized(self) -> str | None:
        """Which collectives ranks have entered as the same one; None if that can't be found out."""
        try:
            return self._inquiry.explain_desync(self._frame(), 3 * self._heartbeats.interval)
        except LostStoreError as error:
            return str(error)

    def agree(self, text: str, about: str = "") -> dict[int, str]:
        """What every rank says about this call, without those that continued and say nothing.

        A call with several topics names each, since another rank may still be at the first.

        A collective would not do: a rank that has nothing to say would pair it with its next collective.
        """
        keys = [f"say/{self.call}/{about}/{rank}" for rank in range(self.size)]
        self._store.set(keys[self.rank], text)
        start = last_check = time.monotonic()
        late: dict[int, float] = {}
        while not self._store.check(keys):
            now = time.monotonic()
            time.sleep(0.002 if now - start < 0.1 else 0.05)
            if now - last_check < 1.0:
                continue
            last_check = now
            silent = [rank for rank in self._heartbeats.others if not self._store.check([keys[rank]])]
            late = {rank: late.get(rank, now) for rank in silent if self._heartbeats.call_of(rank) >= self.call}
            if any(now - seen > SILENCE for seen in late.values()):
                return {rank: self._store.get(keys[rank]).decode() for rank in range(self.size) if rank not in silent}
            self._expect(silent, now - start)
        return {rank: answer.decode() for rank, answer in enumerate(self._store.multi_get(keys))}

    def _expect(self, ranks: list[int], waited: float) -> None:
        """Raise if there is no point in waiting for these ranks any longer."""
        gone = self._heartbeats.gone()
        lost = self._reported() or (self._lost(gone) if gone else None)
        if lost is None and waited > min(LATE, self._limit):
            lost = f"rank {', '.join(map(str, ranks))} did not reach call {self.call} within {waited:.0f} s"
            report = self._inquiry.ask(sys._getframe(1), waited, 3 * self._heartbeats.interval)
            lost += f"; {report}" if report else ""
        if lost is not None:
            raise RankError(lost)

    def _reported(self) -> str | None:
        desync = self._inquiry.known_desync()
        if desync is not None:
            return desync
        key = f"fault/{self.call}"
        if not self._store.check([key]):
            return None
        fault = json.loads(self._store.get(key))
        return None if fault["rank"] == self.rank else str(fault["text"])

    def _hung(self) -> str | None:
        """The hang report, if there is one."""
        key = f"hang/{self.call}"
        return self._store.get(key).decode() if self._store.check([key]) else None

    def _lost(self, ranks: list[int]) -> str:
        time.sleep(0.2)  # a published error is more useful than the news that the process is gone
        reported = self._reported() or self._hung()
        if reported is not None:
            return reported
        left = [rank for rank in ranks if self._store.check([f"left/{rank}"])]
        names = ", ".join(map(str, ranks))
        message = f"rank {names} was lost: its process was killed or died, or its machine is down"
        if left == ranks:
            message = f"rank {names} has ended its script while rank {self.rank} is still at call {self.call}"
            message += "; all ranks must call the model the same number of times"
        self.publish(ranks[0], message)
        return message

    # -- the watch thread ------------------------------------------------------------------

    def _live(self) -> None:
        place: Any = None
        since, known, count = 0.0, 0.0, 0
        beats: Beats = {}
        while not self._ended.wait(self._heartbeats.interval) and dist.is_initialized():
            count += 1
            try:
                self._heartbeats.beat(count, self.call)
                now, here = time.monotonic(), self._waiting()
                self._inquiry.answer(self._frame(), here is not None)
                self._print_idle()
                if here is None or here != place or self.failed == self.call:
                    place, since, known = here, now, 0.0
                    beats.clear()
                    continue
                reason = self._reason(now - since, beats)
                known = (known or now) if reason else 0.0
                if reason and now - known >= GRACE and here == self._waiting():
                    self._stop(reason)
            except LostStoreError:
                return  # the run is over, or collectives fail by themselves

    def _reason(self, waited: float, beats: Beats) -> str | None:
        """Why the main thread, which has waited this long, will wait forever."""
        reported = self._reported()
        if reported is not None or waited < GRACE:
            return reported
        lost = self._heartbeats.gone() or (self._heartbeats.silent(beats) if waited > PATIENCE else [])
        if lost:
            return self._lost(lost)
        if waited > DOUBT and (desync := self._doubt(waited)) is not None:
            return desync
        if waited > max(self._limit - 4 * self._heartbeats.interval, self._limit / 2) and self._hung() is None:
            self._inquire(waited)
        return self._hung() if waited > self._limit + GRACE else None

    def _doubt(self, waited: float) -> str | None:
        return self._inquiry.doubt((self.call, self._notes.total), self._frame(), waited, 3 * self._heartbeats.interval)

    def _inquire(self, waited: float) -> None:
        """Find out why the ranks wait, shortly before the backend times out: its error will include the report."""
        report = self._inquiry.ask(self._frame(), waited, 3 * self._heartbeats.interval)
        if report is not None:
            beats = self._heartbeats
            for call in {self.call, *map(beats.call_of, beats.others)}:  # desynchronized ranks may be in different ones
                self._store.set(f"hang/{call}", report)

    def _aborted(self) -> None:
        """Gloo is about to abort the process, since a message is not as long as this rank expects."""
        self._stop(self.desynchronized() or "gloo received a message of another collective than this rank is in")

    def _print_idle(self) -> None:
        if self._prints:
            mark, beat = (self.call, self._notes.total), self._heartbeats.interval
            after = self._limit - 5 * beat
            report = self._inquiry.idle(mark, self._frame(), after, 3 * beat) if self._notes.total else None
            if report is not None:
                sys.stderr.write(f"shardwright: {report}\n")
                sys.stderr.flush()

    def _waiting(self) -> Any:
        """Where the main thread waits for others, or None if it does something else."""
        frame = self._frame()
        if frame is None or not any(part in frame.f_code.co_filename for part in _WAITING_IN):
            return None
        is_polling = frame.f_code.co_filename == shared_memory.__file__  # which polls
        at = 0 if is_polling else frame.f_lasti
        return self.call, self._notes.total, id(frame), at

    def _frame(self) -> FrameType | None:
        """The frame of the main thread, unless it is tracing.

        Holding a frame keeps its locals alive, and torch copies a tensor it has just made if there is another reference
        to it: the trace does not know the copy and would take it for a tensor from outside.
        """
        if torch.compiler.is_compiling():  # or exporting
            return None
        return sys._current_frames().get(self._thread_watched)

    def _stop(self, reason: str) -> None:
        """End a process whose thread can't be woken."""
        frame = self._frame()
        where = "".join(traceback.format_stack(frame)) if frame is not None else ""
        text = f"{where}shardwright.errors.RankError: {reason} (rank {self.rank} waited for it and exits)\n"
        sys.stderr.write(text)
        sys.stderr.flush()
        write_error_file(text, secondary=True)
        os._exit(1)

    # -- the end ---------------------------------------------------------------------------

    def _uncaught(self, kind: Any, error: BaseException, trace: TracebackType | None) -> None:
        """An uncaught error: report it, or name the primary failure, and print it."""
        if not isinstance(error, Exception):
            self._before(kind, error, trace)
            return
        try:
            self.tell(error)
        except RankError as named:
            error = named
        report_uncaught(error, self.rank, self._first_to_print, self._before)

    def _first_to_print(self, digest: str) -> int | None:
        """The first rank of this machine that ends with an error of this text."""
        try:
            key = f"uncaught/{machine_name()}/{digest}"
            return int(self._store.compare_set(key, "", str(self.rank)).decode())
        except LostStoreError:
            return None

    def end(self) -> None:
        """Stop watching."""
        if not self._ended.is_set():
            self._ended.set()
            atexit.unregister(self.end)
            if sys.excepthook == self._uncaught:
                sys.excepthook = self._before
            self._thread.join(5.0)
            flight_recorder.end()
            with suppress(LostStoreError):
                self._store.set(f"left/{self.rank}", "1")
            self._store.close()


_running: Watch | None = None  # of the newest default process group


def watch() -> Watch | None:
    """The watch of the running process group, started if new. None if there are no other ranks."""
    global _running
    world_group = dist.group.WORLD if dist.is_initialized() else None
    if world_group is not None and _running is not None and _running.of() is world_group:
        return _running
    if world_group is None or dist.get_world_size() < 2 or threading.current_thread() is not threading.main_thread():
        return None
    store: Any = dist.distributed_c10d._get_default_store()
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    if not isinstance(inner, TCPStore):  # fake groups, and ranks as threads
        return None
    if _running is not None:
        _running.end()
    _running = Watch(world_group, store.clone(), dist.get_rank(), dist.get_world_size())
    return _running


def calling() -> AbstractContextManager[None]:
    """The context of a model call: failures in it are reported, or attributed to another rank."""
    running = watch()
    if running is None:
        return nullcontext()
    running.begin()
    return running


def report_failure(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator for a function that communicates in backward or in a step: as `calling`."""

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if _running is not None:
                _running.tell(error)
            raise

    return run

"""Shared memory of the processes of one machine, and the one protocol by which they exchange values through it.

A rank posts its value, waits until all ranks have posted theirs, and reads what it needs of them:

    the sum of all values            all_reduce        the sum of what was posted for me    reduce_scatter
    all values                       all_gather        what was posted for me               all_to_all
    the value of one rank            shift

Each rank writes into a ring buffer of its own. All ranks make the same calls with the same sizes in one order, so
that each knows where in the others' rings a call is, and only flags are exchanged besides the data:

    ring       ...call 7....][.....call 8.....][.call 9.]          reused when all ranks have read it
    flags      posted, read of each rank, for each call            they only grow

To post is to copy and to raise a flag; there is no helper thread, each rank reads while it waits. A value longer
than a few chunks goes chunk by chunk: the first are posted at once, the rest while the call is waited for. Where
more than two ranks sum a large value, each reduces one part in place of its own, and all read the parts.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

import torch
from torch import Tensor

from shardwright.layout import Reduction

from ..faults import flight_recorder
from ..faults.failure import BrokenGroupError, OutOfStepError

CHUNK = 1 << 20  # bytes that are posted at once, at most
DEPTH = 4  # chunks of a call that are in the ring at a time
RING = 2 * DEPTH * CHUNK
CALLS = 64  # calls that may be under way
LINE = 64  # bytes of a cache line: flags of two ranks never share one
HEAD = 4096  # bytes before the flags: the token that identifies the memory
SPIN = 0.002  # seconds of waiting in which a rank yields its core, but does not sleep
PAUSES = (5e-5, 1e-3)  # seconds that it then sleeps at a time: at first, and after LOOK
LOOK = 0.1  # seconds between two checks whether the other ranks are alive

SHARED = 1 << 15  # bytes from which on more than two ranks divide the work of a sum

_POSTED, _SUMMED, _READ, _WHAT = range(4)  # the int64 slots in a call's cache line
_STEPS = 1 << 24  # more than a call has chunks
_NOTHING = torch.empty(0)


def size_for(ranks: int) -> int:
    """How many bytes of shared memory the ranks of a group need."""
    return HEAD + ranks * (CALLS * LINE + RING)


@contextmanager
def _hidden_from_autograd() -> Iterator[None]:
    """Within this, neither autograd nor torch dispatch and function modes see any op.

    Inference mode also allows writing to inference tensors. It is entered first, since leaving it restores all
    of this state.
    """
    with torch.inference_mode(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class SharedMemoryGroup:
    """This rank's view of a group's shared memory. `file` is the open file, in which the rank has locked one byte."""

    def __init__(self, memory: mmap.mmap, file: int, index: int, ranks: tuple[int, ...], limit: float) -> None:
        self.index, self.ranks, self.limit = index, ranks, limit
        self._memory, self._file = memory, file
        self._flags = memoryview(memory)[HEAD : HEAD + len(ranks) * CALLS * LINE].cast("q")
        rings = torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD + len(ranks) * CALLS * LINE)
        self.rings = [rings[at * RING : (at + 1) * RING] for at in range(len(ranks))]
        self.lock = threading.RLock()
        self._fence = threading.Lock()
        self._calls = 0
        self._end = 0  # bytes written in all, as if the ring had no end
        self._unread: deque[PostedCall] = deque()  # calls whose bytes in the ring are still in use, oldest first
        self._stepped: deque[PostedCall] = deque()  # calls under way that need several rounds
        self._broken = ""

    def __del__(self) -> None:
        os.close(self._file)

    def post(self, value: Tensor, out: Tensor, op: Reduction | None, source: int | None = None) -> PostedCall:
        """Post a value of shape [1, n], or [ranks, n] if each rank gets one row of it.

        `out` is [1, n] for a reduction with `op` or the value of one rank, `source`, and else [ranks, n]; it may share
        the memory of `value`.
        """
        with self.lock, _hidden_from_autograd():
            if self._broken:
                self._break(self._broken)
            self._calls += 1
            call = PostedCall(self, self._calls, value, out, op, source)
            call.at = self._place(call.size)
            self._unread.append(call)
            if call.stepped:
                self._stepped.append(call)
            self.declare(call.number, call.what)
            call.send()
            return call

    def _place(self, size: int) -> int:
        """Where the next call is in the rings. Waits until all ranks have read what was there."""
        start = self._end if self._end % RING + size <= RING else -(-self._end // RING) * RING
        self._end = start + size
        while self._unread and (self._unread[0].at < self._end - RING or len(self._unread) == CALLS):
            self._free(self._unread.popleft())
        return start

    def _free(self, call: PostedCall) -> None:
        call.wait()
        self.expect(_READ, call.number, call.chunks)

    def settle(self, before: PostedCall) -> None:
        """Finish older calls that need several rounds: ranks that wait in different orders would deadlock."""
        while self._stepped and self._stepped[0].number < before.number:
            self._stepped[0].finish()
            self._stepped.popleft()

    def declare(self, call: int, what: int) -> None:
        """Publish the kind and size of a call, before any of its data."""
        self._flags[(self.index * CALLS + call % CALLS) * (LINE // 8) + _WHAT] = what

    def compare(self, call: int, what: int) -> None:
        """Raise if another rank has posted a different collective as this call: its bytes would be misread."""
        for rank, name in enumerate(self.ranks):
            theirs = self._flags[(rank * CALLS + call % CALLS) * (LINE // 8) + _WHAT]
            unnamed = not (theirs >> 8 & 0xFFFF and what >> 8 & 0xFFFF)  # a rank that records nothing yet
            if theirs != what and not (unnamed and (theirs ^ what) & ~0xFFFF00 == 0):
                self._break(
                    f"ranks {self.ranks[self.index]} and {name} are out of step: one has posted {what >> 24} bytes "
                    f"where the other has posted {theirs >> 24}, or they are in different collectives",
                    OutOfStepError,
                )

    def raise_flag(self, word: int, call: int, step: int) -> None:
        """Raise this rank's flag."""
        with self._fence:  # a memory barrier: the data must be visible before the flag
            pass
        self._flags[(self.index * CALLS + call % CALLS) * (LINE // 8) + word] = call * _STEPS + step

    def expect(self, word: int, call: int, step: int) -> None:
        """Wait until the flags of all ranks have reached a step."""
        wanted = call * _STEPS + step
        for rank in range(len(self.ranks)):
            at = (rank * CALLS + call % CALLS) * (LINE // 8) + word
            if self._flags[at] < wanted:
                self._wait(at, wanted, rank)
        with self._fence:
            pass

    def _wait(self, at: int, wanted: int, rank: int) -> None:
        if self._broken:
            self._break(self._broken)
        flags, start = self._flags, time.monotonic()
        while flags[at] < wanted and time.monotonic() - start < SPIN:
            os.sched_yield()
        last_check, pause = start, PAUSES[0]
        while flags[at] < wanted:
            now = time.monotonic()
            if now - last_check > LOOK:
                last_check, pause = now, PAUSES[1]
                self._look(at, wanted, rank, now - start)
            time.sleep(pause)

    def _look(self, at: int, wanted: int, rank: int, waited: float) -> None:
        """Raise if a rank has ended or the timeout is over."""
        for other, name in enumerate(self.ranks):
            theirs = at + (other - rank) * CALLS * (LINE // 8)
            if self._flags[theirs] < wanted and self._is_gone(other) and self._flags[theirs] < wanted:
                self._break(f"rank {name} is gone: its process, or its process group, has ended")
        if waited > self.limit:
            self._break(f"rank {self.ranks[rank]} did not enter a collective over shared memory within {waited:.0f} s")

    def _break(self, why: str, kind: type[BrokenGroupError] = BrokenGroupError) -> NoReturn:
        """The ranks are desynchronized: this call and all later ones raise."""
        self._broken = self._broken or why
        raise kind(self._broken)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank has released its lock, which happens only when its process or its groups end."""
        if rank == self.index:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


class PostedCall:
    """One call of one rank: the value that it posts, and where the result goes."""

    def __init__(
        self,
        memory: SharedMemoryGroup,
        number: int,
        value: Tensor,
        out: Tensor,
        op: Reduction | None,
        source: int | None = None,
    ) -> None:
        self._memory, self.number = memory, number
        self._value, self._out, self._op, self._source = value, out, op, source
        self._count, self._length = value.shape
        bytes_each = self._count * value.element_size()
        self._width = min(self._length, CHUNK // bytes_each)  # columns of a chunk
        self._stride = -(-self._width * bytes_each // LINE) * LINE
        self.chunks = -(-self._length // self._width)
        self.size = min(self.chunks, DEPTH) * self._stride
        shared = self._count == 1 and op is not None and len(memory.ranks) > 2
        self._shared = shared and self._width * bytes_each >= SHARED
        self.stepped = self._shared or self.chunks > DEPTH
        kinds = (None, "sum", "max", "min")
        kind = (source is not None) << 3 | kinds.index(op) << 1 | (self._count > 1)
        self.what = self._length * bytes_each << 24 | flight_recorder.take_identity() << 8 | kind
        self.at = 0
        self._sent, self._summed, self._seen = 0, 0, 0

    def send(self) -> None:
        """Post as many chunks as there is room for."""
        until = min(self.chunks, self._seen + DEPTH)
        while self._sent < until:
            start, stop = self._span(self._sent)
            slot = self._slot(self._memory.index, self._sent)
            for number, destination in enumerate(slot):
                if self._count == 1 or number != self._memory.index:
                    destination.copy_(self._value[number, start:stop])
            self._sent += 1
            self._memory.raise_flag(_POSTED, self.number, self._sent)

    def wait(self) -> None:
        """Wait for the other ranks, and write the result."""
        if self._seen < self.chunks:
            with self._memory.lock, _hidden_from_autograd():
                self._memory.settle(self)
                self.finish()

    def finish(self) -> None:
        """Complete this call; older ones that need several rounds are complete."""
        memory, number = self._memory, self.number
        while self._seen < self.chunks:
            memory.expect(_POSTED, number, self._seen + 1)
            if not self._seen:
                memory.compare(number, self.what)
            if self._shared:
                if self._summed == self._seen:
                    self._sum_part(self._seen)
                    self._summed += 1
                memory.raise_flag(_SUMMED, number, self._summed)
                memory.expect(_SUMMED, number, self._summed)
            self._take(self._seen)
            self._seen += 1
            memory.raise_flag(_READ, number, self._seen)
            if self._sent < self.chunks:
                memory.expect(_READ, number, self._seen)
                self.send()
        self._value = self._out = _NOTHING  # so that a reference to this call does not keep them alive

    def _span(self, chunk: int) -> tuple[int, int]:
        return chunk * self._width, min((chunk + 1) * self._width, self._length)

    def _slot(self, rank: int, chunk: int) -> Tensor:
        """Where a chunk of a rank is, as [values, columns]."""
        start, stop = self._span(chunk)
        at = self.at % RING + chunk % DEPTH * self._stride
        count = self._count * (stop - start) * self._value.element_size()
        return self._memory.rings[rank][at : at + count].view(self._value.dtype).view(self._count, -1)

    def _values_of(self, chunk: int) -> list[Tensor]:
        """What all ranks have posted for this rank."""
        start, stop = self._span(chunk)
        mine = self._memory.index
        if self._count == 1:
            return [self._slot(rank, chunk)[0] for rank in range(len(self._memory.ranks))]
        own = self._value[mine, start:stop]  # a rank does not post what it sends to itself
        return [own if rank == mine else self._slot(rank, chunk)[mine] for rank in range(self._count)]

    def _sum_part(self, chunk: int) -> None:
        """Reduce this rank's part in its own slot: no other rank reads it before it is flagged as summed."""
        assert self._op is not None
        values = self._values_of(chunk)
        parts = [value.tensor_split(len(values))[self._memory.index] for value in values]
        sums = torch.empty_like(parts[0])
        reduce(parts, sums, self._op)
        parts[self._memory.index].copy_(sums)

    def _take(self, chunk: int) -> None:
        start, stop = self._span(chunk)
        values = self._values_of(chunk)
        if self._source is not None:
            self._out[0, start:stop].copy_(values[self._source])
        elif self._op is None:
            for value, out in zip(values, self._out, strict=True):
                out[start:stop].copy_(value)
        elif self._shared:
            parts = [value.tensor_split(len(values))[number] for number, value in enumerate(values)]
            torch.cat(parts, out=self._out[0, start:stop])
        else:
            reduce(values, self._out[0, start:stop], self._op)


def reduce(values: list[Tensor], out: Tensor, op: Reduction) -> None:
    """Reduce values in order, so that all ranks get the same bits; float16 and bfloat16 are summed in float32."""
    if op != "sum":
        combine = torch.maximum if op == "max" else torch.minimum
        combine(values[0], values[1], out=out)
        for value in values[2:]:
            combine(out, value, out=out)
    elif out.dtype in (torch.float16, torch.bfloat16) and len(values) > 2:
        total = torch.add(values[0].float(), values[1])
        for value in values[2:]:
            total.add_(value)
        out.copy_(total)
    else:
        torch.add(values[0], values[1], out=out)
        for value in values[2:]:
            out.add_(value)

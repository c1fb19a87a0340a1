"""Memory that the processes of one machine share, and the one way in which they exchange values through it.

A rank posts its value, waits until all have posted theirs, and reads what it needs of them:

    sum of all that is there        all_reduce        sum of what is there for me        reduce_scatter
    all that is there               all_gather        what is there for me               all_to_all

Each rank writes in a ring of its own. All ranks make the same calls with the same sizes in one order, so
that all know where in the rings of the others a call is, and nothing but a flag is said about it:

    ring       ...call 7....][.....call 8.....][.call 9.]          written again when all ranks have read it
    flags      posted, read of each rank, for each call            they only grow

To post is to copy and to raise a flag; nobody works in between, and who waits reads by himself. A value that is
longer than a few pieces goes piece by piece: the first are posted at once, and the rest while it is waited for.
Where more than two ranks sum much, each sums a part, puts it where its own was, and all read the parts.
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
import torch.distributed as dist
from torch import Tensor

from shardwright.layout import Reduction

PIECE = 1 << 20  # bytes that are posted at once
DEPTH = 4  # pieces of a call that are there at a time
RING = 2 * DEPTH * PIECE
CALLS = 64  # that may be under way
LINE = 64  # bytes that a processor moves at a time: flags of two ranks are never in one
HEAD = 4096  # for what says whose memory it is
SPIN = 0.002  # seconds of waiting in which a rank gives its core away, but does not sleep
PAUSES = (5e-5, 1e-3)  # seconds that it then sleeps at a time, first and later
LOOK = 0.1  # seconds between two looks at whether the others live

SHARED = 1 << 15  # bytes from which on more than two ranks share the work of a sum

_POSTED, _SUMMED, _READ, _WHAT = range(4)  # words of a flag's line
_STEPS = 1 << 24  # more than a call has pieces
_NOTHING = torch.empty(0)


def size_for(ranks: int) -> int:
    """How many bytes the ranks of a group share."""
    return HEAD + ranks * (CALLS * LINE + RING)


@contextmanager
def _unseen() -> Iterator[None]:
    """Within this, ops are not part of the program: neither autograd nor anybody who looks at all ops sees them.

    Inference mode also lets values be written that were made in it. It is entered first, since on leaving it puts all
    of this back as it was.
    """
    with torch.inference_mode(), torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction():
        yield


class SharedMemoryGroup:
    """This rank's side of the memory of one group. `file` is its open file, in which it has locked its byte."""

    def __init__(self, memory: mmap.mmap, file: int, index: int, ranks: tuple[int, ...], limit: float) -> None:
        self.index, self.ranks, self.limit = index, ranks, limit
        self._memory, self._file = memory, file
        self._flags = memoryview(memory)[HEAD : HEAD + len(ranks) * CALLS * LINE].cast("q")
        rings = torch.frombuffer(memory, dtype=torch.uint8, offset=HEAD + len(ranks) * CALLS * LINE)
        self.rings = [rings[at * RING : (at + 1) * RING] for at in range(len(ranks))]
        self.lock = threading.RLock()
        self._fence = threading.Lock()
        self._calls = 0
        self._end = 0  # how much was written in all, as if the ring had no end
        self._held: deque[PostedCall] = deque()  # whose place in the ring is taken, oldest first
        self._stepped: deque[PostedCall] = deque()  # calls under way in which ranks wait for each other
        self._broken = ""

    def __del__(self) -> None:
        os.close(self._file)

    def post(self, given: Tensor, out: Tensor, op: Reduction | None) -> PostedCall:
        """Post a value of shape [1, n], or [ranks, n] if each rank is to have a row of it.

        `out` is [1, n] for a reduction with `op`, and else [ranks, n]; it may be the memory of `given`.
        """
        with self.lock, _unseen():
            if self._broken:
                self._break(self._broken)
            self._calls += 1
            posting = PostedCall(self, self._calls, given, out, op)
            posting.at = self._place(posting.size)
            self._held.append(posting)
            if posting.stepped:
                self._stepped.append(posting)
            self.tell(posting.number, posting.what)
            posting.send()
            return posting

    def _place(self, size: int) -> int:
        """Where the next call is in the rings, once all ranks have read what was there."""
        start = self._end if self._end % RING + size <= RING else -(-self._end // RING) * RING
        self._end = start + size
        while self._held and (self._held[0].at < self._end - RING or len(self._held) == CALLS):
            self._free(self._held.popleft())
        return start

    def _free(self, posting: PostedCall) -> None:
        posting.wait()
        self.expect(_READ, posting.number, posting.pieces)

    def settle(self, before: PostedCall) -> None:
        """End older calls that ranks do step by step, since they may wait for calls in another order than others."""
        while self._stepped and self._stepped[0].number < before.number:
            self._stepped[0].finish()
            self._stepped.popleft()

    def tell(self, call: int, what: int) -> None:
        """Say what a call is, before anything of it is posted."""
        self._flags[(self.index * CALLS + call % CALLS) * (LINE // 8) + _WHAT] = what

    def compare(self, call: int, what: int) -> None:
        """Raise if another rank has posted something else as this call: it would be read as what it is not."""
        for rank, name in enumerate(self.ranks):
            theirs = self._flags[(rank * CALLS + call % CALLS) * (LINE // 8) + _WHAT]
            if theirs != what:
                self._break(
                    f"ranks {self.ranks[self.index]} and {name} don't do the same: one has posted {what >> 8} bytes "
                    f"where the other has posted {theirs >> 8}, or they are in other collectives"
                )

    def say(self, word: int, call: int, step: int) -> None:
        """Raise this rank's flag."""
        with self._fence:  # on processors that reorder writes, the data comes before the flag
            pass
        self._flags[(self.index * CALLS + call % CALLS) * (LINE // 8) + word] = call * _STEPS + step

    def expect(self, word: int, call: int, step: int) -> None:
        """Wait until the flags of all ranks are as high."""
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
        looked, pause = start, PAUSES[0]
        while flags[at] < wanted:
            now = time.monotonic()
            if now - looked > LOOK:
                looked, pause = now, PAUSES[1]
                self._look(at, wanted, rank, now - start)
            time.sleep(pause)

    def _look(self, at: int, wanted: int, rank: int, waited: float) -> None:
        """Raise if it makes no sense to wait for a rank any longer."""
        for other, name in enumerate(self.ranks):
            theirs = at + (other - rank) * CALLS * (LINE // 8)
            if self._flags[theirs] < wanted and self._is_gone(other) and self._flags[theirs] < wanted:
                self._break(f"rank {name} is gone: its process, or its process group, has ended")
        if waited > self.limit:
            self._break(f"rank {self.ranks[rank]} did not come to a collective over shared memory in {waited:.0f} s")

    def _break(self, why: str) -> NoReturn:
        """Ranks no longer stand at the same place: this call and all later ones raise."""
        self._broken = self._broken or why
        raise dist.DistError(self._broken)

    def _is_gone(self, rank: int) -> bool:
        """Whether a rank has let its lock go, which only the end of its process, or of its groups, does."""
        if rank == self.index:
            return False
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        fcntl.lockf(self._file, fcntl.LOCK_UN, 1, rank)
        return True


class PostedCall:
    """One call of one rank: what it gave, and where the result goes."""

    def __init__(self, board: SharedMemoryGroup, number: int, given: Tensor, out: Tensor, op: Reduction | None) -> None:
        self._board, self.number = board, number
        self._given, self._out, self._op = given, out, op
        self._rows, self._length = given.shape
        bytes_each = self._rows * given.element_size()
        self._width = min(self._length, PIECE // bytes_each)  # columns of a piece
        self._stride = -(-self._width * bytes_each // LINE) * LINE
        self.pieces = -(-self._length // self._width)
        self.size = min(self.pieces, DEPTH) * self._stride
        shared = self._rows == 1 and op is not None and len(board.ranks) > 2
        self._shared = shared and self._width * bytes_each >= SHARED
        self.stepped = self._shared or self.pieces > DEPTH
        kinds = (None, "sum", "max", "min")
        self.what = self._length * bytes_each << 8 | kinds.index(op) << 1 | (self._rows > 1)
        self.at = 0
        self._sent, self._summed, self._seen = 0, 0, 0

    def send(self) -> None:
        """Post as many pieces as there is room for."""
        until = min(self.pieces, self._seen + DEPTH)
        while self._sent < until:
            start, stop = self._span(self._sent)
            slot = self._slot(self._board.index, self._sent)
            for number, row in enumerate(slot):
                if self._rows == 1 or number != self._board.index:
                    row.copy_(self._given[number, start:stop])
            self._sent += 1
            self._board.say(_POSTED, self.number, self._sent)

    def wait(self) -> None:
        """Wait for the others, and bring the result to its place."""
        if self._seen < self.pieces:
            with self._board.lock, _unseen():
                self._board.settle(self)
                self.finish()

    def finish(self) -> None:
        """The rest of a call, older ones aside."""
        board, number = self._board, self.number
        while self._seen < self.pieces:
            board.expect(_POSTED, number, self._seen + 1)
            if not self._seen:
                board.compare(number, self.what)
            if self._shared:
                if self._summed == self._seen:
                    self._sum_part(self._seen)
                    self._summed += 1
                board.say(_SUMMED, number, self._summed)
                board.expect(_SUMMED, number, self._summed)
            self._take(self._seen)
            self._seen += 1
            board.say(_READ, number, self._seen)
            if self._sent < self.pieces:
                board.expect(_READ, number, self._seen)
                self.send()
        self._given = self._out = _NOTHING  # whoever holds on to this does not hold on to them

    def _span(self, piece: int) -> tuple[int, int]:
        return piece * self._width, min((piece + 1) * self._width, self._length)

    def _slot(self, rank: int, piece: int) -> Tensor:
        """Where a piece of a rank is, as [rows, columns]."""
        start, stop = self._span(piece)
        at = self.at % RING + piece % DEPTH * self._stride
        count = self._rows * (stop - start) * self._given.element_size()
        return self._board.rings[rank][at : at + count].view(self._given.dtype).view(self._rows, -1)

    def _rows_of(self, piece: int) -> list[Tensor]:
        """What all ranks have posted for this one."""
        start, stop = self._span(piece)
        mine = self._board.index
        if self._rows == 1:
            return [self._slot(rank, piece)[0] for rank in range(len(self._board.ranks))]
        own = self._given[mine, start:stop]  # which is not posted
        return [own if rank == mine else self._slot(rank, piece)[mine] for rank in range(self._rows)]

    def _sum_part(self, piece: int) -> None:
        """Reduce this rank's part, where nobody else reads this rank's value."""
        assert self._op is not None
        rows = self._rows_of(piece)
        parts = [row.tensor_split(len(rows))[self._board.index] for row in rows]
        sums = torch.empty_like(parts[0])
        reduce(parts, sums, self._op)
        parts[self._board.index].copy_(sums)

    def _take(self, piece: int) -> None:
        start, stop = self._span(piece)
        rows = self._rows_of(piece)
        if self._op is None:
            for row, out in zip(rows, self._out, strict=True):
                out[start:stop].copy_(row)
        elif self._shared:
            parts = [row.tensor_split(len(rows))[number] for number, row in enumerate(rows)]
            torch.cat(parts, out=self._out[0, start:stop])
        else:
            reduce(rows, self._out[0, start:stop], self._op)


def reduce(rows: list[Tensor], out: Tensor, op: Reduction) -> None:
    """The reduction of rows in their order, the same bits on all ranks; halves are summed as float32."""
    if op != "sum":
        combine = torch.maximum if op == "max" else torch.minimum
        combine(rows[0], rows[1], out=out)
        for row in rows[2:]:
            combine(out, row, out=out)
    elif out.dtype in (torch.float16, torch.bfloat16) and len(rows) > 2:
        total = torch.add(rows[0].float(), rows[1])
        for row in rows[2:]:
            total.add_(row)
        out.copy_(total)
    else:
        torch.add(rows[0], rows[1], out=out)
        for row in rows[2:]:
            out.add_(row)

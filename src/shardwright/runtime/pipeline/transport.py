"""Point-to-point messages: asynchronous, and in order between any two ranks.

`send` and `receive` return at once. What one rank sends to another arrives in the order in
which it was sent, and is received in that order; nothing else is guaranteed, and messages have no
tags. Both sides know the order, since both know the schedule.

`TorchTransport` uses torch.distributed, `QueueTransport` threads of one process in tests. A sent
tensor must not be written to afterwards. It is kept until it has arrived: gloo would read freed
memory, and reports that a send is done only to a waiter, so a thread of the transport waits.
"""

from __future__ import annotations

import queue
import threading
from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import RankError

from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import here, pair_groups

Pairs = Iterable[tuple[int, int]]


class Arrival(Protocol):
    """A tensor in flight to this rank."""

    def wait(self) -> None:
        """Return once the buffer is filled."""


class Transport(Protocol):
    """A rank's point-to-point communication."""

    def send(self, tensor: Tensor, to: int) -> None:
        """Start to send a contiguous tensor."""

    def receive(self, buffer: Tensor, source: int) -> Arrival:
        """Start to receive the next message of a rank into a contiguous buffer."""

    def mark(self) -> Arrival:
        """A handle to wait until everything sent so far has arrived."""

    def flush(self) -> None:
        """Wait until everything sent has arrived: a rank must not exit before that."""


class TorchTransport:
    """Messages by torch.distributed."""

    def __init__(self) -> None:
        world = here()
        self._rank, self._device = world.rank, world.device
        self._groups: dict[tuple[int, int], dist.ProcessGroup] = {}
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()
        self._keeper = SentTensors() if world.device.type == "cpu" else None

    def connect(self, pairs: Pairs) -> None:
        """Connect the first of each pair to the second. All ranks call it together, with equal pairs."""
        groups = pair_groups(pairs, self._device)
        if self._device.type != "cpu":
            self._greet({pair: group for pair, group in groups.items() if pair not in self._groups})
        self._groups.update(groups)

    def _greet(self, groups: Mapping[tuple[int, int], dist.ProcessGroup]) -> None:
        """NCCL connects two ranks at their first message, which blocks both: so all connect now, in the same order."""
        token = torch.zeros(1, device=self._device)
        for (source, target), group in sorted(groups.items(), key=lambda item: item[0]):
            if source == self._rank:
                dist.send(token, target, group=group)
            elif target == self._rank:
                dist.recv(token, source, group=group)

    @report_failure
    def send(self, tensor: Tensor, to: int) -> None:
        flight_recorder.send(self._rank, to)
        work = dist.isend(_bytes(tensor), to, group=self._groups[self._rank, to])
        assert work is not None
        if self._keeper is not None:
            self._keeper.keep(work, tensor)
            return
        self._in_flight.append((work, tensor))
        while self._in_flight[0][0].is_completed():
            self._in_flight.popleft()
            if not self._in_flight:
                return

    @report_failure
    def receive(self, buffer: Tensor, source: int) -> Arrival:
        work = dist.irecv(_bytes(buffer), source, group=self._groups[source, self._rank])
        assert work is not None
        return _Arrival(work, (source, self._rank, flight_recorder.expect(source, self._rank)))

    def mark(self) -> Arrival:
        return _NOTHING if self._keeper is None else self._keeper.mark()

    def flush(self) -> None:
        self.mark().wait()


class _Arrival:
    def __init__(self, work: dist.Work, message: tuple[int, int, int]) -> None:
        self._work, self._message = work, message

    @report_failure
    def wait(self) -> None:
        flight_recorder.wait_for(*self._message)
        self._work.wait()


def _bytes(tensor: Tensor) -> Tensor:
    """Send as bytes: backends don't support all dtypes."""
    return tensor.view(-1).view(torch.uint8)


class SentTensors:
    """Keeps sent tensors until they have arrived. An error of one is raised at the next call."""

    def __init__(self) -> None:
        self._sent: queue.SimpleQueue[tuple[dist.Work, Tensor] | threading.Lock] = queue.SimpleQueue()
        self._error: RuntimeError | None = None
        self._thread: threading.Thread | None = None

    def keep(self, work: dist.Work, tensor: Tensor) -> None:
        self.raise_error()
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="shardwright-sends", daemon=True)
            self._thread.start()
        self._sent.put((work, tensor))

    def mark(self) -> Arrival:
        """A handle to wait until everything kept now has arrived."""
        if self._thread is None:
            return _NOTHING
        gate = threading.Lock()
        gate.acquire()
        self._sent.put(gate)
        return _Mark(self, gate)

    def raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while True:
            sent = self._sent.get()
            if isinstance(sent, tuple):
                self._wait(sent[0])
            else:
                sent.release()
            del sent  # before the next one is awaited

    def _wait(self, work: dist.Work) -> None:
        if self._error is None:
            try:
                work.wait()
            except RuntimeError as error:
                self._error = error


class _Mark:
    def __init__(self, keeper: SentTensors, gate: threading.Lock) -> None:
        self._keeper, self._gate = keeper, gate

    @report_failure
    def wait(self) -> None:
        self._gate.acquire()  # here, not in `threading`: the watch thread must see that this rank waits for others
        self._keeper.raise_error()


class _Nothing:
    def wait(self) -> None:
        """There is nothing to wait for."""


_NOTHING = _Nothing()


def usual() -> TorchTransport | QueueTransport:
    """How ranks communicate: by torch.distributed, or by queues where they are threads. All ranks must call it."""
    if not dist.is_initialized() or dist.get_backend() != "threaded":
        return TorchTransport()
    token = torch.tensor(0)
    if dist.get_rank() == 0:
        transports = QueueTransport.between(dist.get_world_size())
        token.fill_(id(transports))
        _BETWEEN[int(token)] = transports
    dist.broadcast(token, 0)
    mine = _BETWEEN[int(token)][dist.get_rank()]
    dist.barrier()
    _BETWEEN.pop(int(token), None)  # all ranks have taken theirs
    return mine


# -- ranks as threads ------------------------------------------------------------------------


class QueueTransport:
    """Messages between threads: one queue for each ordered pair of ranks. `between` creates one per rank."""

    def __init__(self, rank: int, queues: Mapping[tuple[int, int], queue.SimpleQueue[Tensor]], timeout: float) -> None:
        self._rank, self._queues, self._timeout = rank, queues, timeout
        self._requests: dict[int, deque[_Request]] = defaultdict(deque)

    @staticmethod
    def between(ranks: int, timeout: float = 30.0) -> list[QueueTransport]:
        """One for each rank."""
        pairs = [(a, b) for a in range(ranks) for b in range(ranks)]
        queues: dict[tuple[int, int], queue.SimpleQueue[Tensor]] = {pair: queue.SimpleQueue() for pair in pairs}
        return [QueueTransport(rank, queues, timeout) for rank in range(ranks)]

    def connect(self, pairs: Iterable[tuple[int, int]]) -> None:
        """All are connected."""

    def send(self, tensor: Tensor, to: int) -> None:
        self._queues[self._rank, to].put(tensor.detach())

    def receive(self, buffer: Tensor, source: int) -> Arrival:
        request = _Request(self, buffer, source)
        self._requests[source].append(request)
        return request

    def mark(self) -> Arrival:
        """What is in a queue stays there."""
        return _NOTHING

    def flush(self) -> None:
        """There is nothing to wait for."""

    def fill(self, source: int) -> None:
        """Wait for the next message of a rank, and copy it to the posted buffer."""
        try:
            message = self._queues[source, self._rank].get(timeout=self._timeout)
        except queue.Empty:
            raise RankError(f"rank {self._rank} waited {self._timeout:g} s for a message of rank {source}") from None
        request = self._requests[source].popleft()
        if message.numel() != request.buffer.numel() or message.dtype != request.buffer.dtype:
            raise RankError(
                f"a message of rank {source} to rank {self._rank} is {tuple(message.shape)} {message.dtype}, but "
                f"{tuple(request.buffer.shape)} {request.buffer.dtype} was expected"
            )
        request.buffer.copy_(message.reshape(request.buffer.shape))
        request.there = True


class _Request:
    """A posted receive. Those of a pair are filled in order."""

    def __init__(self, transport: QueueTransport, buffer: Tensor, source: int) -> None:
        self.buffer, self.there = buffer, False
        self._transport, self._source = transport, source

    def wait(self) -> None:
        while not self.there:
            self._transport.fill(self._source)


_BETWEEN: dict[int, list[QueueTransport]] = {}  # for threads that have not taken theirs yet

"""Messages arrive in the order in which they were sent, whole, and what is sent stays until then."""

import threading
import time
import weakref

import pytest
import torch

from shardwright.errors import RankError
from shardwright.runtime.pipeline.transport import QueueTransport, TorchTransport
from tests.runtime.ranks import run_processes

DTYPES = (torch.float64, torch.bfloat16, torch.bool, torch.int8, torch.complex64)


def test_between_threads_messages_keep_their_order():
    first, second = QueueTransport.between(2)
    buffers = [torch.zeros(2) for _ in range(3)]
    arrivals = [second.receive(buffer, 0) for buffer in buffers]
    for number in range(3):
        first.send(torch.full((2,), float(number)), 1)
    arrivals[2].wait()  # also fills those before it
    assert [buffer[0].item() for buffer in buffers] == [0.0, 1.0, 2.0]


def test_between_threads_a_wrong_message_is_refused():
    first, second = QueueTransport.between(2)
    first.send(torch.zeros(3), 1)
    with pytest.raises(RankError, match=r"rank 0 to rank 1 is \(3,\) torch.float32, but \(2,\) torch.float32 was"):
        second.receive(torch.zeros(2), 0).wait()


def test_between_threads_nobody_waits_for_ever():
    transport = QueueTransport.between(2, timeout=0.05)[0]
    with pytest.raises(RankError, match=r"rank 0 waited 0.05 s for a message of rank 1"):
        transport.receive(torch.zeros(2), 1).wait()


def exchanged(rank):
    """Both ranks send before they receive, and many messages are under way in both directions."""
    transport = TorchTransport()
    transport.connect({(0, 1), (1, 0)})
    other = 1 - rank
    sent = [torch.arange(4).add(10 * number + rank).to(dtype) for number in range(8) for dtype in DTYPES]
    for tensor in sent:
        transport.send(tensor, other)
    buffers = [torch.zeros_like(tensor) for tensor in sent]
    arrivals = [transport.receive(buffer, other) for buffer in buffers]
    for arrival in arrivals:
        arrival.wait()
    transport.flush()
    return buffers


def test_on_gloo_all_dtypes_arrive_in_order():
    for rank, result in enumerate(run_processes(2, exchanged)):
        wanted = [torch.arange(4).add(10 * number + 1 - rank).to(dtype) for number in range(8) for dtype in DTYPES]
        for mine, other in zip(result, wanted, strict=True):
            assert torch.equal(mine, other)


def from_two(rank):
    """The message of rank 2 is there before that of rank 1, which is asked for first."""
    transport = TorchTransport()
    transport.connect({(1, 0), (2, 0)})
    if rank:
        time.sleep(0.3 * (2 - rank))
        transport.send(torch.full((2,), float(rank)), 0)
        transport.flush()
        return []
    buffers = [torch.zeros(2), torch.zeros(2)]
    for arrival in [transport.receive(buffer, source) for source, buffer in enumerate(buffers, 1)]:
        arrival.wait()
    return [buffer[0].item() for buffer in buffers]


def test_on_gloo_a_message_is_that_of_the_rank_that_is_asked():
    assert run_processes(3, from_two)[0] == [1.0, 2.0]


def kept(rank):
    """A send does not wait for the receiver, a mark does; the tensor lives exactly as long."""
    transport = TorchTransport()
    transport.connect({(0, 1)})
    if rank == 1:
        buffer = torch.zeros(1 << 16)
        time.sleep(1.0)
        transport.receive(buffer, 0).wait()
        return buffer.sum().item()
    tensor, gone = torch.ones(1 << 16), threading.Event()
    weakref.finalize(tensor.untyped_storage(), gone.set)
    start = time.monotonic()
    transport.send(tensor, 1)
    del tensor
    mark, sent, alive = transport.mark(), time.monotonic() - start, not gone.is_set()
    mark.wait()
    return sent, alive, time.monotonic() - start, gone.wait(5.0)


def test_on_gloo_a_sent_tensor_lives_until_it_has_arrived():
    (sent, alive, waited, gone), total = run_processes(2, kept)
    assert total == 1 << 16
    assert alive and gone
    assert sent < 0.5 < waited

"""Values over shared memory, on ranks that are threads: each has a side of its own of the same memory."""

from __future__ import annotations

import gc
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardwright.runtime.collectives import shared_memory
from shardwright.runtime.collectives.shared_memory import PostedCall, SharedMemoryGroup

RANKS = (3, 5, 7, 11)  # as the world numbers them
DTYPES = [
    torch.float64, torch.float32, torch.bfloat16, torch.float16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8,
]  # fmt: skip


@contextmanager
def reserved(n: int) -> Iterator[int]:
    file = os.memfd_create("test")
    os.posix_fallocate(file, 0, shared_memory.size_for(n))
    try:
        yield file
    finally:
        os.close(file)


def side(file: int, index: int, n: int, limit: float = 60.0) -> SharedMemoryGroup:
    own = os.open(f"/proc/self/fd/{file}", os.O_RDWR)
    return SharedMemoryGroup(mmap.mmap(own, shared_memory.size_for(n)), own, index, RANKS[:n], limit)


def run(
    n: int, fn: Callable[[SharedMemoryGroup], Any], monkeypatch: pytest.MonkeyPatch, limit: float = 60.0
) -> list[Any]:
    """What `fn` returns on every rank."""
    monkeypatch.setattr(
        SharedMemoryGroup, "_is_gone", lambda self, rank: False
    )  # a process does not stop itself by its locks
    with reserved(n) as file, ThreadPoolExecutor(n) as pool:
        return list(pool.map(fn, [side(file, index, n, limit) for index in range(n)]))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rings that are full after a few numbers."""
    monkeypatch.setattr(shared_memory, "CHUNK", 256)
    monkeypatch.setattr(shared_memory, "RING", 2048)
    monkeypatch.setattr(shared_memory, "SHARED", 128)


def value(rank: int, size: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    if dtype.is_floating_point:
        return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-60, 60, (size,), generator=generator).to(dtype)


def total(values: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, halves as float32."""
    half = values[0].dtype in (torch.float16, torch.bfloat16)
    collected = [value.float() if half else value for value in values]
    actual = collected[0]
    for other in collected[1:]:
        actual = actual + other
    return actual.to(values[0].dtype)


def all_reduce(at: SharedMemoryGroup, x: Tensor, op: str = "sum") -> PostedCall:
    return at.post(x.view(1, -1), x.view(1, -1), op)


def every_collective(at: SharedMemoryGroup, size: int, dtype: torch.dtype) -> list[Tensor]:
    n = len(at.ranks)
    collected = []
    for op in ("sum", "max", "min"):
        x = value(at.index, size, dtype)
        all_reduce(at, x, op).wait()
        collected.append(x)
    x = value(at.index, size * n, dtype).view(n, size)
    for item, rows, op in ((x[:1].clone(), n, None), (x, 1, "sum"), (x, n, None)):
        out = torch.empty(rows, size, dtype=dtype)
        at.post(item, out, op).wait()
        collected.append(out.view(-1))
    return collected


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_collective_gives_what_it_should(n: int, small: None, monkeypatch: Any) -> None:
    cases = [(size, dtype) for dtype in DTYPES for size in (1, 5, 33, 150)]
    cases.append((900, torch.float64))  # more than a ring holds

    results = run(n, lambda at: [every_collective(at, *case) for case in cases], monkeypatch)

    for at, (size, dtype) in enumerate(cases):
        collected = [result[at] for result in results]
        values = [value(rank, size, dtype) for rank in range(n)]
        rows = [value(rank, size * n, dtype).view(n, size) for rank in range(n)]
        stacked = torch.stack(values)
        for rank, (summed, most, least, gathered, scattered, exchanged) in enumerate(collected):
            assert torch.equal(summed, total(values))
            assert torch.equal(most, stacked.amax(0))
            assert torch.equal(least, stacked.amin(0))
            assert torch.equal(gathered, torch.cat([row[0] for row in rows]))
            assert torch.equal(scattered, total([row[rank] for row in rows]))
            assert torch.equal(exchanged, torch.cat([row[rank] for row in rows]))


def test_sizes_as_they_are(monkeypatch: Any) -> None:
    size = shared_memory.RING // 8 + 3  # longer than what is posted at once
    results = run(2, lambda at: every_collective(at, size, torch.float32), monkeypatch)
    assert torch.equal(results[0][0], total([value(rank, size, torch.float32) for rank in range(2)]))
    assert torch.equal(results[0][0], results[1][0])


def test_calls_may_be_awaited_in_any_order(small: None, monkeypatch: Any) -> None:
    sizes = [1, 70, 40, 300, 2, 90, 60] * 3

    def fn(at: SharedMemoryGroup) -> list[Tensor]:
        values = [value(at.index, size, torch.float64, seed) for seed, size in enumerate(sizes)]
        begun = [all_reduce(at, x) for x in values]
        for posting in begun if at.index == 0 else reversed(begun):
            posting.wait()
            posting.wait()  # and again, which does nothing
        return values

    for result in run(3, fn, monkeypatch):
        for seed, (size, x) in enumerate(zip(sizes, result, strict=True)):
            assert torch.equal(x, total([value(rank, size, torch.float64, seed) for rank in range(3)]))


def test_a_rank_that_never_looks_stops_nobody(small: None, monkeypatch: Any) -> None:
    calls = 5 * shared_memory.CALLS

    def fn(at: SharedMemoryGroup) -> list[float]:
        values = [torch.tensor([float(at.index + call)]) for call in range(calls)]
        begun = [all_reduce(at, x) for x in values]
        if at.index:
            begun[-1].wait()  # the others look at nothing but the last
        else:
            for posting in begun:
                posting.wait()
        return [float(x) for x in (values if at.index == 0 else values[: calls - shared_memory.CALLS])]

    first, second = run(2, fn, monkeypatch)
    assert first == [2.0 * call + 1 for call in range(calls)]
    assert second == first[: len(second)]


def test_all_ranks_have_the_same_bits(monkeypatch: Any) -> None:
    for size in (100, 50_000):
        results = run(4, lambda at, size=size: every_collective(at, size, torch.float32)[0], monkeypatch)
        assert all(torch.equal(results[0], other) for other in results)


def test_values_of_inference_and_leaves_can_be_summed(monkeypatch: Any) -> None:
    def fn(at: SharedMemoryGroup) -> tuple[Tensor, int]:
        with torch.inference_mode():
            x = torch.ones(3)
            posting = all_reduce(at, x)
        posting.wait()  # in-place changes of such a tensor are refused out here
        plain = torch.ones(3)
        before = plain._version
        all_reduce(at, plain).wait()
        return x, plain._version - before

    for x, changes in run(2, fn, monkeypatch):
        assert x.tolist() == [2, 2, 2]
        assert changes > 0  # autograd sees that a value it has kept was changed


def test_who_looks_at_all_ops_does_not_see_those_of_a_collective(monkeypatch: Any) -> None:
    class Looks(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    seen: list[str] = []

    def fn(at: SharedMemoryGroup) -> None:
        x = torch.ones(3)
        flat = x.view(1, -1)
        with Looks():
            at.post(flat, flat, "sum").wait()
            seen.append("after")
            x.sum()
        assert x.tolist() == [2, 2, 2]

    run(2, fn, monkeypatch)
    assert sorted(seen) == ["after", "after", "aten.sum.default", "aten.sum.default"]


def test_what_is_awaited_is_let_go(monkeypatch: Any) -> None:
    def fn(at: SharedMemoryGroup) -> int:
        x = torch.ones(1000)
        posting = all_reduce(at, x)
        posting.wait()
        gc.collect()
        return torch._C._storage_Use_Count(x.untyped_storage()._cdata)

    alone = torch.ones(1000)
    assert set(run(2, fn, monkeypatch)) == {torch._C._storage_Use_Count(alone.untyped_storage()._cdata)}


def test_a_rank_that_does_not_come_is_named(monkeypatch: Any) -> None:
    def fn(at: SharedMemoryGroup) -> str:
        if at.index == 1:
            return ""
        start = time.monotonic()
        with pytest.raises(dist.DistError, match="rank 5 did not enter") as error:
            all_reduce(at, torch.ones(1)).wait()
        assert 0.3 <= time.monotonic() - start < 10
        with pytest.raises(dist.DistError, match="rank 5 did not enter"):
            all_reduce(at, torch.ones(1))
        return str(error.value)

    assert run(2, fn, monkeypatch, limit=0.3)[0]


def test_ranks_that_do_not_do_the_same_are_told(monkeypatch: Any) -> None:
    def fn(at: SharedMemoryGroup) -> None:
        with pytest.raises(dist.DistError, match=r"ranks \d and \d are out of step: one has posted \d+ bytes"):
            all_reduce(at, torch.ones(1 + at.index)).wait()

    run(2, fn, monkeypatch)


def test_other_threads_run_while_a_rank_waits(monkeypatch: Any) -> None:
    monkeypatch.setattr(shared_memory, "SPIN", 60.0)
    counted = [0]

    def count() -> None:
        for _ in range(200):
            counted[0] += 1
            time.sleep(1e-4)

    def fn(at: SharedMemoryGroup) -> None:
        if at.index == 1:
            thread = threading.Thread(target=count)
            thread.start()
            thread.join(30)  # the other waits until all is counted
        all_reduce(at, torch.ones(1)).wait()

    run(2, fn, monkeypatch)
    assert counted == [200]


OTHER = """
import fcntl, os, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 1)
print("here", flush=True)
time.sleep(60)
"""


def test_a_killed_process_is_named() -> None:
    with reserved(2) as file:
        path = f"/proc/{os.getpid()}/fd/{file}"
        other = subprocess.Popen([sys.executable, "-S", "-c", OTHER, path], stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        assert other.stdout.readline() == "here\n"
        first = side(file, 0, 2)
        posting = all_reduce(first, torch.ones(1))
        assert not first._is_gone(1)

        timer = threading.Timer(0.3, other.send_signal, [signal.SIGKILL])
        timer.start()
        start = time.monotonic()
        with pytest.raises(dist.DistError, match="rank 5 is gone"):
            posting.wait()
        assert time.monotonic() - start < 10
        timer.join()
        other.wait()
        other.stdout.close()

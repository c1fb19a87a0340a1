"""Which way values go between processes: over shared memory, or by gloo as before; and with the same results."""

from __future__ import annotations

import errno
import gc
import os
from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.runtime.collectives import process_group
from tests.runtime.ranks import run_processes, run_ranks

DTYPES = (
    torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.int8, torch.uint8,
)  # fmt: skip


def every(group: dist.ProcessGroup, size: int, dtype: torch.dtype, exact: bool = False) -> list[Tensor]:
    n, rank = group.size(), group.rank()

    def values(size: int) -> Tensor:
        whole = torch.randint(-60, 60, (size,), generator=torch.Generator().manual_seed(rank))
        stored = (whole / 3).to(dtype) if dtype.is_floating_point else whole.to(dtype)
        return stored.double() if exact else stored

    results = [values(size) for _ in ("sum", "max", "min")]
    begun = [process_group.all_reduce(x, group, op) for x, op in zip(results, ("sum", "max", "min"), strict=True)]
    first, many = values(size), values(n * size)
    gathered, scattered, sent = many.clone(), first.clone(), many.clone()
    begun.append(process_group.all_gather(gathered, first, group))
    begun.append(process_group.reduce_scatter(scattered, many, group))
    begun.append(process_group.all_to_all(sent, many, group))
    for work in begun:
        work.wait()
    return [*results, gathered, scattered, sent]


def has_board(group: dist.ProcessGroup) -> bool:
    process_group.all_reduce(torch.zeros(1), group).wait()
    return process_group._shared_groups[group] is not None


def both_ways(rank: int) -> None:
    shared = dist.new_group()
    with mock.patch.dict(os.environ, SHARDWRIGHT_SHARED_MEMORY="0"):
        sent = dist.new_group()
        assert not has_board(sent)
    assert has_board(shared)
    for size, dtype in [*((1000, dtype) for dtype in DTYPES), (0, torch.float32), (300_001, torch.float32)]:
        ways = every(shared, size, dtype), every(sent, size, dtype), every(shared, size, dtype, exact=True)
        for mine, theirs, true in zip(*ways, strict=True):
            off = (mine.double() - true).abs()
            if dtype.is_floating_point:
                assert bool((off <= 2 * torch.finfo(dtype).eps * 60).all())
            if dtype.itemsize == 2:  # at least as exact as gloo, which rounds after each sum
                assert bool((off <= (theirs.double() - true).abs()).all())
            else:
                torch.testing.assert_close(mine, theirs)
    flags = torch.tensor([rank == 1, True])
    out = torch.empty(6, dtype=torch.bool)
    process_group.all_gather(out, flags, shared).wait()
    assert out.tolist() == [False, True, True, True, False, True]


def test_both_ways_give_the_same() -> None:
    run_processes(3, both_ways)


def full(file: int, at: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def ways(rank: int) -> dict[str, bool]:
    actual = {"alone": has_board(dist.new_group())}
    with mock.patch.dict(os.environ, SHARDWRIGHT_SHARED_MEMORY="0" if rank == 1 else "1"):
        actual["one does not want to"] = has_board(dist.new_group())
    with mock.patch.object(os, "posix_fallocate", full):
        actual["no room"] = has_board(dist.new_group())
    with mock.patch.object(process_group, "machine_name", return_value=f"machine {rank}"):
        actual["two machines"] = has_board(dist.new_group())
    real = os.open
    with mock.patch.object(os, "open", lambda *value: real("/dev/zero", os.O_RDWR) if rank == 1 else real(*value)):
        actual["another file"] = has_board(dist.new_group())
    return actual


def test_all_ranks_go_one_way() -> None:
    expected = {
        "alone": True, "one does not want to": False, "no room": False, "two machines": False, "another file": False,
    }  # fmt: skip
    assert run_processes(2, ways) == [expected, expected]


def shared_files() -> int:
    gc.collect()
    maps = Path("/proc/self/maps").read_text().count("memfd:shardwright")
    links = [os.path.realpath(f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
    return maps + sum("memfd:shardwright" in link for link in links)


def freed(rank: int) -> tuple[int, int, list[str]]:
    group = dist.new_group()
    assert has_board(group)
    before, names = shared_files(), [name for name in os.listdir("/dev/shm") if "shardwright" in name]
    dist.barrier()
    dist.destroy_process_group(group)
    del group
    return before, shared_files(), names


def test_nothing_is_left_of_a_group_that_is_destroyed() -> None:
    for before, after, names in run_processes(2, freed):
        assert before > 0
        assert after == 0
        assert names == []


def by_threads(rank: int) -> list[float]:
    x = torch.ones(2)
    process_group.all_reduce(x, None).wait()
    assert process_group._shared_groups[dist.group.WORLD] is None
    return x.tolist()


def test_ranks_that_are_threads_communicate_as_ever() -> None:
    assert run_ranks(2, by_threads) == [[2, 2], [2, 2]]

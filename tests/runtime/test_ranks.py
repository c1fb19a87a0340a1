"""The harness itself: results in order, errors shown, hangs ended."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.runtime.ranks import run_processes, run_ranks

RUNNERS = [run_ranks, run_processes]


def total(rank: int, offset: int) -> tuple[int, int]:
    x = torch.tensor(rank + offset)
    dist.all_reduce(x)
    return rank, int(x)


def fail_on_one(rank: int) -> None:
    if rank == 1:
        raise ValueError("one is broken")
    dist.all_reduce(torch.zeros(1))


def hang_on_one(rank: int) -> None:
    if rank == 1:
        threading.Event().wait()
    dist.all_reduce(torch.zeros(1))


def backward(rank: int) -> float:
    x = torch.ones(3, requires_grad=True)
    (x * 2).sum().backward()
    assert x.grad is not None
    return float(x.grad.sum())


@pytest.mark.parametrize("run", RUNNERS)
def test_results_come_in_rank_order(run) -> None:
    assert run(3, total, 10) == [(0, 33), (1, 33), (2, 33)]


@pytest.mark.parametrize("run", RUNNERS)
def test_the_error_of_a_rank_is_raised_while_others_wait_for_it(run) -> None:
    with pytest.raises(ValueError, match="one is broken"):
        run(3, fail_on_one)


@pytest.mark.parametrize("run", RUNNERS)
def test_a_hang_is_a_failure(run) -> None:
    began = time.monotonic()
    with pytest.raises(Exception, match=r"did not end|[Tt]imed out|timeout"):
        run(2, hang_on_one, timeout=2)
    assert time.monotonic() - began < 15


@pytest.mark.parametrize("run", RUNNERS)
def test_autograd_works_after_autograd_in_the_test_process(run) -> None:
    backward(0)
    assert run(2, backward) == [6.0, 6.0]


def test_a_run_after_a_failed_run_is_clean() -> None:
    with pytest.raises(ValueError, match="one is broken"):
        run_ranks(2, fail_on_one)
    assert run_ranks(2, total, 0) == [(0, 1), (1, 1)]

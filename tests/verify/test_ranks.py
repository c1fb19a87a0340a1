"""Ranks started from one process: results in order, errors that come out, nothing that hangs."""

import threading

import pytest
import torch
import torch.distributed as dist

from shardwright.errors import InputError, RankError
from shardwright.verify import verify
from shardwright.verify.ranks import run
from tests.models.zoo import ZOO


def total(rank, start):
    values = torch.tensor([float(rank + start)])
    dist.all_reduce(values)
    return rank, float(values)


def raises_on_one(rank):
    if rank == 1:
        raise InputError("rank one does not like it")
    dist.barrier()


def waits_for_ever(rank):
    if rank == 1:
        dist.barrier()


@pytest.mark.parametrize("method", ["threads", "processes"])
def test_results_come_in_the_order_of_ranks(method):
    assert run(method, 2, total, 10, timeout=60) == [(0, 21.0), (1, 21.0)]


@pytest.mark.parametrize("method", ["threads", "processes"])
def test_the_error_of_a_rank_comes_out_as_it_was_raised(method):
    with pytest.raises(InputError, match="does not like it"):
        run(method, 2, raises_on_one, timeout=60)


def test_ranks_that_hang_are_ended():
    with pytest.raises(RankError, match="did not end within"):
        run("threads", 2, waits_for_ever, timeout=1)


def test_work_that_cannot_be_pickled_is_refused():
    with pytest.raises(RankError, match="can't be pickled"):
        run("processes", 2, total, threading.Lock())


def test_verify_on_processes():
    module, args, kwargs = ZOO["mlp"]()
    report = verify(module, "dp=2", example=(args, kwargs), method="processes", steps=1)
    assert report.passed, str(report)


def inside(rank):
    """As under torchrun: a world is there, and the parameters of the ranks differ."""
    torch.set_num_threads(1)
    module, args, kwargs = ZOO["mlp"]()
    with torch.no_grad():
        module.up.weight.add_(rank)
    before = module.up.weight.clone()
    report = verify(module, "tp=2", example=(args, kwargs), steps=1)
    return report.passed, str(report.worst), torch.equal(before, module.up.weight)


def test_verify_inside_a_world_compares_with_rank_0():
    first, second = run("processes", 2, inside)
    assert first[0]
    assert first == second
    assert first[2]

"""What a rank notes about its collectives: each one, once."""

from contextlib import ExitStack
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import clip_grad_norm_

import shardwright as sw
from shardwright.runtime.faults import flight_recorder
from tests.parity.threaded import world_of
from tests.runtime.ranks import run_ranks

KINDS = ("all_reduce", "all_gather_single", "reduce_scatter_single")


@pytest.mark.parametrize("plan", ["dp=2", "zero1=2", "zero2=2", "zero3=2"])
def test_every_collective_of_a_step_is_entered_once(plan, tmp_path):
    x = torch.randn(4, 3)
    nets = [nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)) for _ in range(world_of(plan))]
    entered, issued = [], []

    def rank(number):
        optimizer = torch.optim.SGD(nets[number].parameters(), lr=0.1)
        model, _ = sw.parallelize(nets[number], optimizer, plan=plan, example=(x,), compile={"directory": tmp_path})
        model(x).sum().backward()  # the first step compares inputs
        optimizer.zero_grad()
        dist.barrier()
        if number == 0:
            entered.clear(), issued.clear()
        dist.barrier()
        model(x).sum().backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        dist.barrier()

    def noted(where, real, name):
        def call(*args, **options):
            where.append(name)
            return real(*args, **options)

        return call

    with ExitStack() as patched:
        patched.enter_context(
            mock.patch.object(flight_recorder, "enter", noted(entered, flight_recorder.enter, "entered"))
        )
        for name in KINDS:
            patched.enter_context(mock.patch.object(dist, name, noted(issued, getattr(dist, name), name)))
        run_ranks(world_of(plan), rank)
    assert issued
    assert len(entered) == len(issued)

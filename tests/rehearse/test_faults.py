"""Programs that are wrong in one place, each caught by a rehearsal of a plan that goes through that place."""

import pytest
import torch
from examples.gpt import GPT, GPTConfig

from shardwright.rehearse import rehearse
from shardwright.runtime.algorithms import linears
from shardwright.runtime.collectives import blocks, comm, process_group
from shardwright.runtime.parameters import buckets, zero3

gatherer = zero3.UnitGatherer
gather_unit, stack_up = gatherer.open, blocks.unstack


def unchanged(x, *rest, **named):
    return x


def own_part(x, dim, group, sharding=None, **named):
    return comm.shard(x, dim, group, sharding)


def first_part(x, dim, group, sharding=None, **named):
    return x.narrow(dim, 0, x.shape[dim] // group.size)


def sums_nothing(tensor, group, *rest):
    return process_group.DONE


FAULTS = {
    "a sum over tp is left out": ("tp=8", [(comm, "all_reduce", unchanged), (comm, "all_reduce_", unchanged)]),
    "the backward of a linear does not sum": (
        "tp=8",
        [(linears.comm, "all_reduce_async", lambda x, group, *rest: lambda: x)],
    ),
    "a reduce_scatter does not sum": ("sp=8", [(comm, "reduce_scatter", own_part)]),
    "the backward of a gathering linear does not sum": (
        "sp=8",
        [
            (
                linears.comm,
                "reduce_scatter_async",
                lambda x, dim, group, sharding: lambda: comm._shard(x, dim, group, sharding),
            )
        ],
    ),
    "gradients are not summed over replicas": ("dp=8", [(buckets.process_group, "all_reduce", sums_nothing)]),
    "all replicas take the same rows": ("dp=8", [(comm, "shard", first_part)]),
    "all microbatches are the first": ("pp=4", [(comm, "_shard", first_part)]),
    "shards are put together in the wrong order": (
        "zero3=8",
        [(blocks, "unstack", lambda stacked, dim, cut: stack_up(stacked.flip(0), dim, cut))],
    ),
    "a gathered weight is slightly off": (
        "zero3=8",
        [(gatherer, "open", lambda self, unit: {k: v * (1 + 1e-6) for k, v in gather_unit(self, unit).items()})],
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(name, monkeypatch):
    plan, patches = FAULTS[name]
    with torch.device("meta"):
        model = GPT(GPTConfig(vocab=50304, seq=1024, n_layer=4, n_head=16, d=2048))
        ids = torch.zeros(512, 1024, dtype=torch.int64)
    for owner, attribute, wrong in patches:
        monkeypatch.setattr(owner, attribute, wrong)

    rehearsal = rehearse(plan, model, example=(ids, ids), steps=1)

    assert not rehearsal.passed
    assert not rehearsal.report.passed
    assert rehearsal.changed == ()  # the program is the plan's; it computes something else

"""Inputs without a batch dim beside others that have one: exact in all three input modes, or refused with a remedy."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from shardwright.errors import InputError, PlanError
from shardwright.parallelize import parallelize
from shardwright.parallelize import plan as make_plan
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .looped import gradients
from .threaded import world_of


class Masked(nn.Module):
    """Attention with a mask that has no batch dim, and a loss."""

    def __init__(self, d: int = 16) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 3 * d), nn.Linear(d, d)

    def forward(self, x, mask):
        q, k, v = self.up(x).chunk(3, -1)
        scores = (q @ k.transpose(1, 2)).masked_fill(mask, -1e9)
        return self.down(scores.softmax(-1) @ v).square().mean() + 0.1 * mask.to(x.dtype).sum()


class Prior(nn.Module):
    """A sum over an input without a batch dim, which would be counted once for each group if it were taken for rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, prior):
        return self.linear(x).square().mean() * (prior * prior).sum()


def causal(seq):
    return torch.ones(seq, seq).triu(1).bool()


def samples(kind, seq=5, batch=8):
    generator = torch.Generator().manual_seed(1)
    if kind is Prior:
        return torch.randn(batch, 4, generator=generator, dtype=torch.float64), torch.arange(4.0, dtype=torch.float64)
    return torch.randn(batch, seq, 16, generator=generator, dtype=torch.float64), causal(seq)


def seeded(kind):
    torch.manual_seed(0)
    return kind().double()


def one_device(kind, *calls):
    net = seeded(kind)
    losses = [net(*call) for call in calls]
    sum(losses).backward()
    return [torch.stack(losses).detach(), *gradients(net)]


def ranks_find(kind, plan, tmp_path, inputs, *calls, **options):
    """The losses and gradients of calls with global batches, of which each rank passes what its mode says."""
    nets = [seeded(kind) for _ in range(world_of(plan))]

    def run(rank):
        model = parallelize(nets[rank], plan=plan, inputs=inputs, **grouped(directory=tmp_path, **options))
        losses = []
        for x, other in calls:
            parts, per_part = (1 if inputs == "global" else 2), world_of(plan) // 2
            losses.append(model(x.chunk(parts)[rank // per_part % parts].contiguous(), other))
            losses[-1].backward()
        return [torch.stack(losses).detach(), *gradients(model)]

    return run_ranks(world_of(plan), run, timeout=120)


def assert_close(ranks, wanted):
    for rank in ranks:
        for mine, other in zip(rank, wanted, strict=True):
            assert float((mine - other).abs().max()) <= 1e-10 * float(other.abs().max())


@pytest.mark.parametrize("plan", ["dp=2", "tp=2", "zero3=2", "dp=2,tp=2"])
def test_a_mask_beside_a_batch_that_all_ranks_pass(tmp_path, plan):
    call = samples(Masked)
    assert_close(ranks_find(Masked, plan, tmp_path, "global", call), one_device(Masked, call))


@pytest.mark.parametrize("plan", ["tp=2", "dp=2"])
def test_a_mask_beside_samples_that_are_gathered(tmp_path, plan):
    call = samples(Masked)
    assert_close(ranks_find(Masked, plan, tmp_path, "per_rank", call), one_device(Masked, call))


@pytest.mark.parametrize("plan", ["dp=2", "dp=2,tp=2"])
def test_a_mask_beside_the_samples_of_each_replica(tmp_path, plan):
    call = samples(Masked)
    assert_close(ranks_find(Masked, plan, tmp_path, "per_replica", call), one_device(Masked, call))


@pytest.mark.parametrize(("plan", "inputs"), [("dp=2", "global"), ("dp=2", "per_replica"), ("tp=2", "per_rank")])
def test_a_table_of_the_size_of_the_batch_is_named(tmp_path, plan, inputs):
    call = samples(Prior, batch=8)  # 4 samples a rank, and a prior of 4
    actual = ranks_find(Prior, plan, tmp_path, inputs, call, unbatched=["prior"])
    assert_close(actual, one_device(Prior, call))


@pytest.mark.parametrize(("plan", "inputs"), [("dp=2", "per_replica"), ("tp=2", "per_rank")])
def test_a_smaller_batch_later_turns_no_mask_into_samples(tmp_path, plan, inputs):
    calls = samples(Prior, batch=12), samples(Prior, batch=8)  # 6 samples a rank, then as many as the prior has
    assert_close(ranks_find(Prior, plan, tmp_path, inputs, *calls), one_device(Prior, *calls))


class Stacked(nn.Module):
    """Two layers that read the mask, so that each stage of a pipeline does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(2))

    def forward(self, x, mask):
        for layer in self.layers:
            x = (layer(x) @ x.transpose(1, 2)).masked_fill(mask, 0.0).tanh() @ x
        return x.square().mean()


class Crossing(Stacked):
    """What is made of the mask in the first stage is read in the second."""

    def forward(self, x, mask):
        bias = (mask.to(x.dtype) @ mask.to(x.dtype)).tanh()
        for layer in self.layers:
            x = (layer(x) @ x.transpose(1, 2) + bias).tanh() @ x
        return x.square().mean()


def piped(rank, kind, seq, directory, options):
    model = parallelize(seeded(kind), plan="pp=2", **grouped(directory=directory, microbatches=2, **options))
    model(*samples(kind, seq)).backward()
    return gradients(model)


@pytest.mark.parametrize("semantics", ["global", "local"])
def test_a_mask_that_each_stage_of_a_pipeline_reads(pools, tmp_path, semantics):
    wanted = one_device(Stacked, samples(Stacked))[1:]
    results = pools[2].run(piped, Stacked, 5, str(tmp_path), {"microbatch_semantics": semantics}, timeout=120)
    assert_close(results, wanted)


@pytest.mark.parametrize("semantics", ["global", "local"])
def test_a_mask_of_the_size_of_the_batch_that_crosses_stages(pools, tmp_path, semantics):
    wanted = one_device(Crossing, samples(Crossing, seq=8))[1:]
    options = {"microbatch_semantics": semantics, "unbatched": ["mask"]}
    assert_close(pools[2].run(piped, Crossing, 8, str(tmp_path), options, timeout=120), wanted)


def test_a_batch_is_planned_for_where_a_mask_comes_first():
    class Turned(Masked):
        def forward(self, mask, x):
            return super().forward(x, mask)

    x, mask = samples(Masked)
    assert make_plan(seeded(Turned), example=(mask, x), plan="dp=2").choices("train")


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.image, self.text = nn.Linear(12, 4), nn.Linear(9, 4)

    def forward(self, images, texts):
        return self.image(images).square().mean() + self.text(texts).square().mean()


def test_what_sizes_do_not_tell_is_refused_where_it_is_needed(tmp_path):
    example = torch.randn(8, 12), torch.randn(16, 9)
    remedy = r"images \[8, 12\], texts \[16, 9\]\); name those that have none: CompileOptions\(unbatched="
    with pytest.raises(PlanError, match=remedy):
        make_plan(Pair(), example=example, plan="dp=2")
    plan = make_plan(Pair(), example=example, plan="dp=2", compile={"unbatched": ["texts"]})
    assert [name for name, choice in plan.choices("train").items() if choice and name.startswith("text")] == []
    assert make_plan(Pair(), example=example, plan="tp=2").choices("train")

    def run(rank):
        parallelize(copy.deepcopy(Pair()), plan="tp=2", inputs="per_rank", compile={"directory": tmp_path})(*example)

    with pytest.raises(InputError, match=r'inputs="per_rank": .*different sizes of dim 0 .*unbatched='):
        run_ranks(2, run)


def test_samples_of_each_replica_that_can_not_be_told_are_refused(tmp_path):
    def run(rank):
        model = parallelize(copy.deepcopy(Pair()), plan="dp=2", inputs="per_replica", compile={"directory": tmp_path})
        model(torch.randn(8, 12), torch.randn(16, 9))

    with pytest.raises(InputError, match=r'inputs="per_replica": .*different sizes of dim 0 .*unbatched='):
        run_ranks(2, run)


def test_a_name_that_no_input_has_is_refused():
    with pytest.raises(InputError, match=r"Masked has no input maks; its inputs are x, mask"):
        parallelize(Masked(), plan="single", compile={"unbatched": ["maks"]})
    with pytest.raises(InputError, match=r"unbatched=\['mask'\]"):
        parallelize(Masked(), plan="single", compile={"unbatched": "mask"})


@pytest.mark.parametrize("inputs", ["global", "per_replica", "per_rank"])
def test_an_input_without_a_batch_dim_must_be_the_same_everywhere(tmp_path, inputs):
    x, mask = samples(Masked)
    nets = [seeded(Masked) for _ in range(2)]

    def run(rank):
        model = parallelize(nets[rank], plan="dp=2", inputs=inputs, compile={"directory": tmp_path})
        mine = x if inputs == "global" else x.chunk(2)[rank].contiguous()
        for call in range(3):
            model(mine, mask.logical_not() if (call, rank) == (2, 1) else mask).backward()

    words = "in call 3 of the model rank 1 passes another (mask than rank 0|batch than rank 0: mask differs)"
    with pytest.raises(InputError, match=words):
        run_ranks(2, run)

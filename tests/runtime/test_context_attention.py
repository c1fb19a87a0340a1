"""Attention on shards of a sequence against attention on all of it: thousands of random calls, ranks as threads."""

import math
import random
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Axis, Block, Shard, make_shard
from shardwright.runtime import Group
from shardwright.runtime.algorithms.context_attention import context_attention
from shardwright.runtime.collectives import blocks
from shardwright.verify.ranks import run_threads

EXACT = 1e-12
CALLS = 300  # for each number of ranks


@dataclass(frozen=True)
class Call:
    """One call of the global attention, and how its sequence is sharded."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    mask: Tensor | None
    causal: bool
    scale: float | None
    queries: Shard
    keys: Shard
    ring: bool

    def expected(self) -> list[Tensor]:
        leaves = [x.clone().requires_grad_() for x in (self.q, self.k, self.v)]
        gqa = self.q.shape[-3:-2] != self.k.shape[-3:-2]
        out = F.scaled_dot_product_attention(
            *leaves, attn_mask=self.mask, is_causal=self.causal, scale=self.scale, enable_gqa=gqa
        )
        return [out, *torch.autograd.grad(out, leaves, self.grad)]


def drawn(rng: random.Random, ranks: int) -> Call:
    heads = rng.choice([1, 2, 3])
    groups = rng.choice([1, 1, 2, 4])
    batch, width = rng.choice([1, 2]), rng.choice([1, 4, 5])
    causal = rng.random() < 0.5
    striped = causal and rng.random() < 0.6
    count = ranks * rng.randrange(1, 5) if striped else rng.randrange(ranks * ranks, ranks * ranks + 9)
    others = count if causal or rng.random() < 0.7 else rng.randrange(ranks * ranks, ranks * ranks + 7)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    q, k, v = normal(batch, heads * groups, count, width), *(normal(batch, heads, others, width) for _ in "kv")
    mask = None
    if not causal and rng.random() < 0.5:
        shape = (rng.choice([1, batch]), rng.choice([1, heads * groups]), rng.choice([1, count]), others)
        mask = normal(*shape) if rng.random() < 0.5 else normal(*shape) > -0.5
        if mask.dtype is torch.bool:
            mask[..., 0] = True  # torch gives NaN gradients to rows that see nothing
    return Call(
        q=q, k=k, v=v, grad=normal(*q.shape), mask=mask, causal=causal, scale=rng.choice([None, 0.3]),
        queries=shard(count, ranks, striped), keys=shard(others, ranks, striped), ring=rng.random() < 0.7,
    )  # fmt: skip


def shard(count: int, ranks: int, striped: bool) -> Shard:
    block = Block(count // ranks, ranks, 1) if striped else Block(1, count, 1)
    return make_shard(Axis(name="cp", size=ranks), (block,))


def deviation(call: Call, group: Group) -> float:
    """How far this rank's results and gradients are from its shards of the global ones."""
    own = [(call.queries, call.q), (call.keys, call.k), (call.keys, call.v)]

    def mine(sharding: Shard, x: Tensor) -> Tensor:
        return blocks.shard(x, -2, sharding, group.size, group.index).contiguous()

    leaves = [
        (mine(sharding, x) if call.ring or at == 0 else x.clone()).requires_grad_()
        for at, (sharding, x) in enumerate(own)
    ]
    mask = call.mask
    if mask is not None and mask.shape[-2] > 1:
        mask = mine(call.queries, mask)
    out = context_attention(
        *leaves, attn_mask=mask, scale=call.scale, is_causal=call.causal,
        ring=group if call.ring else None, sharding=call.keys if call.ring else None,
        splits=[(-2, group, call.queries)],
    )  # fmt: skip
    got = [out, *torch.autograd.grad(out, leaves, mine(call.queries, call.grad))]
    expected = call.expected()
    wanted = [mine(call.queries, x) for x in expected[:2]]
    if call.ring:
        wanted += [mine(call.keys, x) for x in expected[2:]]
    else:  # the gradient of gathered keys is a pending sum
        wanted += expected[2:]
        got[2:] = [total(x, group) for x in got[2:]]
    return max((a - b).detach().abs().max().item() if a.numel() else 0.0 for a, b in zip(got, wanted, strict=True))


def total(x: Tensor, group: Group) -> Tensor:
    torch.distributed.all_reduce(x, group=group.process_group)
    return x


def ring(rank: int, ranks: int) -> Group:
    world = torch.distributed.group.WORLD
    return Group(axes=("cp",), size=ranks, ranks=tuple(range(ranks)), index=rank, process_group=world)


def many(rank: int, ranks: int) -> list[tuple[float, int]]:
    group, rng = ring(rank, ranks), random.Random(ranks)
    calls = [drawn(rng, ranks) for _ in range(CALLS)]
    return [(deviation(call, group), at) for at, call in enumerate(calls)]


@pytest.mark.parametrize("ranks", range(2, 9))
def test_shards_of_a_sequence_attend_as_the_whole(ranks):
    for results in run_threads(ranks, many, ranks):
        assert len(results) == CALLS
        assert max(results)[0] < EXACT, f"call {max(results)[1]}"


@pytest.mark.parametrize("batch", [(), (3,), (2, 2, 3)], ids=["no heads", "no batch", "two batch dims"])
@pytest.mark.parametrize("mask", [False, True])
def test_attention_takes_any_number_of_dims_before_the_sequence(batch, mask):
    q, k, v, grad = (torch.randn(*batch, 6, 4, dtype=torch.float64) for _ in range(4))
    halves = shard(6, 2, striped=False)
    for at_keys in (True, False):
        call = Call(
            q=q, k=k, v=v, grad=grad, mask=torch.randn(*batch, 6, 6).double() if mask else None, causal=not mask,
            scale=None, queries=halves, keys=halves, ring=at_keys,
        )  # fmt: skip
        assert max(run_threads(2, lambda rank, call=call: deviation(call, ring(rank, 2)))) < EXACT


def test_the_check_would_notice_a_wrong_place():
    """Contiguous places for striped shards give other results."""
    call = drawn(random.Random(4), 2)
    while not (call.causal and call.ring and call.queries.blocks[0].outer > 1):
        call = drawn(random.Random(random.randrange(1000)), 2)

    def work(rank: int) -> float:
        group = ring(rank, 2)
        own = [blocks.shard(x, -2, call.keys, 2, rank).contiguous() for x in (call.q, call.k, call.v)]
        out = context_attention(*own, is_causal=True, scale=call.scale, ring=group)
        return float((out - blocks.shard(call.expected()[0], -2, call.keys, 2, rank)).detach().abs().max())

    assert max(run_threads(2, work)) > 1e-3


def test_shards_in_runs_are_refused():
    group = Group(axes=("cp",), size=2, ranks=(0, 1), index=0)
    x = torch.randn(1, 1, 4, 2)
    runs = make_shard(Axis(name="cp", size=2), (Block(2, 2, 2),))
    with pytest.raises(LayoutError, match="contiguous and striped"):
        context_attention(x, x, x, is_causal=True, ring=group, sharding=runs)


def test_a_gradient_of_a_gradient_is_refused():
    def work(rank: int) -> None:
        group = ring(rank, 2)
        x = torch.randn(1, 1, 4, 2, requires_grad=True)
        out = context_attention(x, x, x, ring=group)
        with pytest.raises(InputError, match="gradients of gradients"):
            torch.autograd.grad(out.sum(), x, create_graph=True)

    run_threads(2, work)


def test_results_are_finite_where_a_block_is_not_seen():
    """The first rank of contiguous shards sees none of the keys of the others."""

    def work(rank: int) -> bool:
        group = ring(rank, 3)
        x = torch.full((1, 1, 2, 4), float(rank), requires_grad=True)
        out = context_attention(x, x, x, is_causal=True, ring=group)
        out.sum().backward()
        assert x.grad is not None
        return math.isfinite(out.sum().item()) and bool(torch.isfinite(x.grad).all())

    assert all(run_threads(3, work))


@pytest.mark.parametrize(("before", "after"), [(11, -7), (7, -6), (3, 0), (None, -9)])
def test_a_window_that_no_rank_sees_among_its_own_keys(before, after):
    """Keys far behind their queries: the first step of the ring has nothing to see, the others do."""
    q, k, v = torch.randn(3, 1, 2, 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    places = torch.arange(16)
    seen = places <= places[:, None] + after
    if before is not None:
        seen &= places >= places[:, None] - before
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

    def work(rank: int) -> float:
        own = [x.chunk(4, -2)[rank].contiguous() for x in (q, k, v)]
        out = context_attention(*own, before=before, after=after, ring=ring(rank, 4))
        return (out - expected.chunk(4, -2)[rank]).abs().max().item()

    assert max(run_threads(4, work)) < EXACT

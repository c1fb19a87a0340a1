"""A layer of experts split over ranks equals the layer on one, however tokens choose."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.layout import Axis, Block, Mesh, make_shard
from shardwright.runtime.algorithms.experts import experts
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_processes, run_ranks

D, WIDE = 5, 7


def layer(up: Tensor, down: Tensor):
    """Each token by each of its experts: the plain way to say it."""

    def run(rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        zeros = torch.zeros_like(rows)
        for expert in range(up.shape[0]):
            token, which = torch.where(index == expert)
            first = torch.tanh(rows[token] @ up[expert]) @ down[expert]
            zeros = zeros.index_add(0, token, first * weights[token, which, None])
        return zeros

    return run


def case(count: int, tokens: int, k: int, choice: str) -> list[Tensor]:
    torch.manual_seed(0)
    up, down = torch.randn(count, D, WIDE).double(), torch.randn(count, WIDE, D).double()
    x, w = torch.randn(tokens, D).double(), torch.rand(tokens, k).double()
    index = torch.stack([torch.randperm(count)[:k] for _ in range(tokens)])
    if choice == "one":  # all tokens want the last experts: the others, and their rank, get none
        index = torch.arange(count - k, count).expand(tokens, k).contiguous()
    if choice == "skewed":
        index[: tokens // 2] = torch.arange(k)
    return [x, index, w, up, down]


def whole(x: Tensor, index: Tensor, w: Tensor, up: Tensor, down: Tensor) -> list[Tensor]:
    values = [tensor.clone().requires_grad_() for tensor in (x, w, up, down)]
    out = layer(values[2], values[3])(values[0], index, values[1])
    return [out.detach(), *torch.autograd.grad((out * torch.arange(D)).sum(), values)]


def on_rank(rank: int, size: int, x: Tensor, index: Tensor, w: Tensor, up: Tensor, down: Tensor):
    mesh = Mesh(axes=(Axis(name="ep", size=size),))
    group = Groups(mesh, [("ep",)])["ep"]
    sharding = make_shard(mesh.axes[0], (Block(1, up.shape[0], 1),), 1)
    mine = [up[s : s + n] for s, n in sharding.spans(size, rank)] or [up[:0]]
    down_mine = [down[s : s + n] for s, n in sharding.spans(size, rank)] or [down[:0]]
    rows = [t.chunk(size)[rank].clone() for t in (x, index, w)]
    values = [t.clone().requires_grad_() for t in (rows[0], rows[2], torch.cat(mine), torch.cat(down_mine))]
    with comm.recording() as issued:
        out = experts(layer(values[2], values[3]), values[0], rows[1], values[1], group, sharding)
        gradients = torch.autograd.grad((out * torch.arange(D)).sum(), values)
    assert {kind for kind, _, _ in issued} == {"all_to_all"}
    return [out.detach(), *gradients]


@pytest.mark.parametrize("choice", ["random", "skewed", "one"])
@pytest.mark.parametrize(("size", "count", "k"), [(2, 4, 2), (2, 5, 1), (3, 8, 3), (4, 4, 2)])
def test_tokens_find_their_experts_and_the_way_back(size, count, k, choice):
    tensors = case(count, 12, k, choice)
    expected = whole(*tensors)

    ranks = run_ranks(size, on_rank, size, *tensors)

    for at, want in enumerate(expected):
        torch.testing.assert_close(torch.cat([rank[at] for rank in ranks]), want, rtol=0, atol=1e-12)


def test_on_real_processes():
    tensors = case(5, 8, 2, "skewed")
    expected = whole(*tensors)

    ranks = run_processes(2, on_rank, 2, *tensors)

    for at, want in enumerate(expected):
        torch.testing.assert_close(torch.cat([rank[at] for rank in ranks]), want, rtol=0, atol=1e-12)

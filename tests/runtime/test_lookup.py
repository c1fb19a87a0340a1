"""A table split on its rows gives what the whole table gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Axis, Block, Mesh, Shard
from shardwright.runtime.algorithms.lookup import embedding_rows
from shardwright.runtime.collectives import blocks, comm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_ranks

IDS = torch.tensor([[0, 5, 5], [8, 3, 1]])
CUTS = {
    "plain": Shard(axis="tp", blocks=(Block(1, 9, 1),)),
    "empty": Shard(axis="tp", blocks=(Block(1, 1, 9),)),
    "fused": Shard(axis="tp", blocks=(Block(3, 3, 1),)),
}


def on_rank(rank: int, n: int, table: Tensor, sharding: Shard | None, padding: int | None) -> tuple[Tensor, Tensor]:
    tp = Groups(Mesh(axes=(Axis(name="tp", size=n),)))["tp"]
    mine = blocks.shard(table, 0, sharding or blocks.plain(9), n, rank).clone().requires_grad_()
    y = comm.all_reduce(embedding_rows(IDS, mine, tp, sharding, rows=9, padding_idx=padding), tp)
    (y * y).sum().backward()
    assert mine.grad is not None
    return y.detach(), mine.grad


@pytest.mark.parametrize("padding", [None, 5, -1])
@pytest.mark.parametrize(("n", "label"), [(3, None), (2, "plain"), (4, "plain"), (3, "empty"), (2, "fused")])
def test_lookup_equals_the_whole_table(n: int, label: str | None, padding: int | None) -> None:
    table = torch.randn(9, 4, dtype=torch.float64)
    sharding = CUTS[label] if label else None

    results = run_ranks(n, on_rank, n, table, sharding, padding)

    whole = table.clone().requires_grad_()
    expected = F.embedding(IDS, whole, padding)
    (expected * expected).sum().backward()
    assert whole.grad is not None
    assert all(torch.equal(y, expected) for y, _ in results)
    assert torch.equal(blocks.unshard([dx for _, dx in results], 0, sharding or blocks.plain(9)), whole.grad)


def misfit(rank: int) -> None:
    tp = Groups(Mesh(axes=(Axis(name="tp", size=2),)))["tp"]
    with pytest.raises(LayoutError, match="a table of 9 rows"):
        embedding_rows(IDS, torch.zeros(5, 2), tp, rows=9)
    with pytest.raises(RuntimeError, match="an id is not in a table of 8 rows"):
        embedding_rows(IDS, torch.zeros(4, 2), tp)


def test_what_does_not_fit_is_refused() -> None:
    run_ranks(2, misfit)

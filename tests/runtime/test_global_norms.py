"""Norms of shards become norms of whole tensors, and their gradients those of one device."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.layout import Axis, Mesh
from shardwright.runtime.parameters.norms import global_norm, make_norm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_ranks

WHOLE = torch.tensor([[3.0, -1.0], [0.5, 4.0], [0.0, -4.0], [2.0, 1.0]], dtype=torch.float64)
INF = float("inf")


def shard_norm(rank: int, order: float) -> tuple[Tensor, Tensor]:
    groups = Groups(Mesh(axes=(Axis(name="tp", size=2),)))
    mine = WHOLE[2 * rank : 2 * rank + 2].clone().requires_grad_()
    return mine, make_norm(torch.linalg.vector_norm(mine, order), ("tp",), groups, order, None, "w")


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, INF])
def test_a_norm_and_its_gradient_are_those_of_the_whole(order):
    def body(rank):
        mine, norm = shard_norm(rank, order)
        total = norm * 2 + torch.stack([norm, norm]).sum()
        total.backward()
        return total.detach(), mine.grad

    whole = WHOLE.clone().requires_grad_()
    (4 * torch.linalg.vector_norm(whole, order)).backward()
    results = run_ranks(2, body)
    for total, _ in results:
        torch.testing.assert_close(total, 4 * torch.linalg.vector_norm(WHOLE, order))
    torch.testing.assert_close(torch.cat([gradient for _, gradient in results]), whole.grad)


@pytest.mark.parametrize(("order", "wanted"), [(-INF, 0.0), (0.0, 7.0)])
def test_the_least_and_the_number_of_elements(order, wanted):
    def body(rank):
        return global_norm(shard_norm(rank, order)[1]).item()

    assert run_ranks(2, body) == [wanted, wanted]


def test_a_gradient_of_its_gradient_is_refused_with_a_remedy():
    def body(rank):
        mine, norm = shard_norm(rank, 2.0)
        with pytest.raises(InputError, match=r"write p\.square\(\)\.sum\(\)\.sqrt\(\), which has"):
            torch.autograd.grad(norm * 1.0, mine, create_graph=True)

    run_ranks(2, body)

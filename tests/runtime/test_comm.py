"""Every reshard, forward and backward, against the definition of the layouts.

The oracle knows only what a rank holds of a whole tensor in each layout:

    S   its runs          W, F   all of it         P   something, with the right sum

and that the gradient of S is S, of W is W, of F is P, of P is W.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Axis, Block, Mesh, Shard
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Group, Groups
from tests.runtime.ranks import run_processes, run_ranks

GRADIENT = {"S": "S", "I": "I", "R": "P", "P": "I"}


def group_of(n: int) -> Group:
    return Groups(Mesh(axes=(Axis(name="tp", size=n),)))["tp"]


def shard_of(*blocks: Block, repeat: int = 1) -> Shard:
    return Shard(axis="tp", blocks=blocks, repeat=repeat)


SHARDINGS: dict[str, tuple[int, Shard | None]] = {
    "even": (12, None),
    "plain": (12, shard_of(Block(1, 12, 1))),
    "fused": (72, shard_of(Block(3, 12, 2))),
    "sections": (48, shard_of(Block(1, 24, 1), Block(1, 12, 1), Block(1, 12, 1))),
    "uneven": (7, shard_of(Block(1, 7, 1))),
    "uneven fused": (32, shard_of(Block(2, 5, 1), Block(1, 3, 2), repeat=2)),
    "empty": (3, shard_of(Block(1, 1, 3))),
}


def global_tensor(size: int, dim: int, seed: int, others: int = 12) -> Tensor:
    shape = [2, others, 2]
    shape[dim] = size
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-50, 50, shape, generator=generator).double()
    return x.transpose(0, 2).contiguous().transpose(0, 2)  # not contiguous


def local_value(kind: str, x: Tensor, rank: int, n: int, dim: int, sharding: Shard | None) -> Tensor:
    """What a rank has of a global tensor, in one of the four layout states."""
    if kind in "IR":
        return x
    if kind == "P":
        parts = [torch.randint(-9, 9, x.shape, generator=torch.Generator().manual_seed(i)).to(x) for i in range(n - 1)]
        parts.append(x - sum(parts))
        return parts[rank]
    spans = sharding.spans(n, rank) if sharding else [(rank * x.shape[dim] // n, x.shape[dim] // n)]
    indices = [i for start, length in spans for i in range(start, start + length)]
    return x.index_select(dim, torch.tensor(indices, dtype=torch.long))


def check(kind: str, actual: list[Tensor], x: Tensor, dim: int, sharding: Shard | None) -> None:
    if kind == "P":
        assert torch.equal(sum(actual), x)
        return
    for rank, y in enumerate(actual):
        assert torch.equal(y, local_value(kind, x, rank, len(actual), dim, sharding))


RESHARDS: dict[str, tuple[str, str, list[str], list[str]]] = {
    "all_reduce": ("P", "I", ["all_reduce"], []),
    "replicate": ("I", "R", [], ["all_reduce"]),
    "all_reduce_to_r": ("P", "R", ["all_reduce"], ["all_reduce"]),
    "all_gather": ("S", "I", ["all_gather"], []),
    "all_gather_to_r": ("S", "R", ["all_gather"], ["reduce_scatter"]),
    "shard": ("I", "S", [], ["all_gather"]),
    "shard_from_r": ("R", "S", [], []),
    "reduce_scatter": ("P", "S", ["reduce_scatter"], ["all_gather"]),
    "zero_pad": ("S", "P", [], []),
    "partial": ("I", "P", [], []),
    "invariant": ("R", "I", [], []),
}


def bind(name: str, dim: int, sharding: Shard | None) -> Callable[[Tensor, Group], Tensor]:
    plain, _, state = name.replace("_to_r", " dst").replace("_from_r", " src").partition(" ")
    function = partial(getattr(comm, plain), **({state: comm.R} if state else {}))
    along = plain in ("all_gather", "shard", "reduce_scatter", "zero_pad")
    return partial(function, dim=dim, sharding=sharding) if along else function


def convert_all(rank: int, n: int, name: str, cases: list[tuple[int, str]]) -> list[tuple[Tensor, Tensor, list[str]]]:
    source, target, _, _ = RESHARDS[name]
    group, results = group_of(n), []
    for dim, label in cases:
        size, sharding = SHARDINGS[label]
        x = local_value(source, global_tensor(size, dim, 1), rank, n, dim, sharding).requires_grad_()
        gradient = local_value(GRADIENT[target], global_tensor(size, dim, 2), rank, n, dim, sharding)
        before = x.detach().clone(), gradient.clone()
        with comm.recording() as issued:
            y = bind(name, dim, sharding)(x, group=group)
            y.backward(gradient)
        assert x.grad is not None
        assert torch.equal(x.detach(), before[0])
        assert torch.equal(gradient, before[1])
        results.append((y.detach(), x.grad, [kind for kind, _, _ in issued]))
    return results


@pytest.mark.parametrize("n", [2, 3, 4])
@pytest.mark.parametrize("name", RESHARDS)
def test_reshards_do_what_the_layouts_mean(name: str, n: int) -> None:
    source, target, forward, backward = RESHARDS[name]
    cases = [(dim, label) for label in SHARDINGS for dim in (0, 1, 2)]

    results = run_ranks(n, convert_all, n, name, cases)

    for at, (dim, label) in enumerate(cases):
        size, sharding = SHARDINGS[label]
        check(target, [ranks[at][0] for ranks in results], global_tensor(size, dim, 1), dim, sharding)
        check(GRADIENT[source], [ranks[at][1] for ranks in results], global_tensor(size, dim, 2), dim, sharding)
        assert all(ranks[at][2] == forward + backward for ranks in results)


def exchange_all(rank: int, n: int, cases: list[tuple[int, str, int, str]]) -> list[tuple[Tensor, Tensor]]:
    group, results = group_of(n), []
    for from_dim, from_label, to_dim, to_label in cases:
        (value, gradient), from_cut, to_shard = exchange_case(from_dim, from_label, to_dim, to_label)
        x = local_value("S", value, rank, n, from_dim, from_cut).requires_grad_()
        y = comm.all_to_all(x, from_dim, to_dim, group, from_cut, to_shard)
        y.backward(local_value("S", gradient, rank, n, to_dim, to_shard))
        assert x.grad is not None
        results.append((y.detach(), x.grad))
    return results


def exchange_case(
    from_dim: int, from_label: str, to_dim: int, to_label: str
) -> tuple[tuple[Tensor, Tensor], Shard | None, Shard | None]:
    (from_size, from_cut), (to_size, to_shard) = SHARDINGS[from_label], SHARDINGS[to_label]
    shape = [2, 2, 2]
    shape[from_dim], shape[to_dim] = from_size, to_size
    value = torch.arange(torch.Size(shape).numel()).double().view(shape)
    return (value, value.flip(0) + 3), from_cut, to_shard


@pytest.mark.parametrize("n", [2, 3, 4])
def test_exchange_moves_the_split_to_another_dim(n: int) -> None:
    dims = [(0, 1), (1, 0), (0, 2), (2, 1)]
    cases = [(a, source, b, target) for a, b in dims for source in SHARDINGS for target in SHARDINGS]
    cases += [(1, "plain", 1, "even")]

    results = run_ranks(n, exchange_all, n, cases)

    for at, (a, source, b, target) in enumerate(cases):
        (value, gradient), from_cut, to_shard = exchange_case(a, source, b, target)
        check("S", [ranks[at][0] for ranks in results], value, b, to_shard)
        check("S", [ranks[at][1] for ranks in results], gradient, a, from_cut)


def other_blocks(rank: int) -> Tensor:
    x = local_value("S", global_tensor(12, 1, 1), rank, 2, 1, None)
    return comm.all_to_all(x, 1, 1, group_of(2), None, shard_of(Block(3, 2, 2)))


def test_exchange_on_one_dim_changes_the_blocks() -> None:
    check("S", run_ranks(2, other_blocks), global_tensor(12, 1, 1), 1, shard_of(Block(3, 2, 2)))


def odd_values(rank: int) -> None:
    group = group_of(3)
    assert comm.all_reduce(torch.tensor(rank), group).item() == 3
    assert comm.all_reduce(torch.tensor([rank == 1, False]), group).tolist() == [True, False]
    assert comm.all_reduce(torch.tensor([rank, -rank]), group, op="max").tolist() == [2, 0]
    assert comm.all_reduce(torch.tensor([rank == 0, True]), group, op="min").tolist() == [False, True]
    assert comm.all_gather(torch.tensor([rank == 1]), 0, group).tolist() == [False, True, False]
    assert comm.reduce_scatter(torch.tensor([rank == 1] * 3), 0, group).tolist() == [True]
    assert comm.all_reduce(torch.tensor(1.5, dtype=torch.bfloat16), group).item() == 4.5
    scalar = torch.tensor(2.0, requires_grad=True)
    comm.replicate(scalar, group).backward()
    assert scalar.grad is not None
    assert scalar.grad.item() == 3
    spread = torch.ones(2, requires_grad=True)
    comm.replicate(spread, group).sum().backward()  # the incoming gradient is one number, expanded
    assert spread.grad is not None
    assert spread.grad.tolist() == [3, 3]
    assert comm.all_gather(torch.zeros(0, 2), 0, group).shape == (0, 2)


def test_integers_booleans_scalars_and_expanded_gradients() -> None:
    run_ranks(3, odd_values)


def twice_differentiated(rank: int) -> Tensor:
    x = torch.full((2,), rank + 1.0, dtype=torch.float64, requires_grad=True)
    y = comm.all_reduce(x**3, group_of(2))
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), x)
    return second


def test_a_gradient_has_a_gradient() -> None:
    assert [x.tolist() for x in run_ranks(2, twice_differentiated)] == [[6, 6], [12, 12]]


def test_a_group_of_one_does_nothing() -> None:
    group = group_of(1)
    x = torch.ones(5, requires_grad=True)
    assert comm.all_gather(x, 0, group) is x
    assert comm.all_reduce(x, group) is x
    assert comm.all_to_all(x, 0, 0, group) is x
    assert comm.all_reduce(x, group, op="max") is x


def test_scaling_a_gradient_leaves_the_value() -> None:
    x = torch.ones(2, requires_grad=True)
    y = comm.scale_gradient(x, 0.5)
    y.sum().backward()
    assert torch.equal(y, x)
    assert x.grad is not None
    assert x.grad.tolist() == [0.5, 0.5]


def uneven_without_sharding(rank: int) -> None:
    with pytest.raises(LayoutError, match=r"shape \(5,\) does not divide by the 2 ranks of tp"):
        comm.shard(torch.zeros(5), 0, group_of(2))
    with pytest.raises(LayoutError, match="pass a sharding"):
        comm.reduce_scatter(torch.zeros(5), 0, group_of(2))
    with pytest.raises(LayoutError, match="should have 3 elements"):
        comm.zero_pad(torch.zeros(5), 0, group_of(2), shard_of(Block(1, 6, 1)))


def test_an_uneven_dim_needs_its_sharding() -> None:
    run_ranks(2, uneven_without_sharding)


def every_collective(rank: int, n: int, shared: str) -> list[list[tuple[Tensor, Tensor, list[str]]]]:
    os.environ["SHARDWRIGHT_SHARED_MEMORY"] = shared
    cases = [(dim, label) for label in ("even", "fused", "uneven", "empty") for dim in (0, 1)]
    odd_values(rank)
    return [convert_all(rank, n, name, cases) for name in RESHARDS]


@pytest.mark.parametrize("shared", ["0", "1"])
def test_every_collective_on_real_processes(shared: str) -> None:
    cases = [(dim, label) for label in ("even", "fused", "uneven", "empty") for dim in (0, 1)]

    results = run_processes(3, every_collective, 3, shared)

    for which, name in enumerate(RESHARDS):
        for at, (dim, label) in enumerate(cases):
            size, sharding = SHARDINGS[label]
            values = [ranks[which][at][0] for ranks in results]
            gradients = [ranks[which][at][1] for ranks in results]
            check(RESHARDS[name][1], values, global_tensor(size, dim, 1), dim, sharding)
            check(GRADIENT[RESHARDS[name][0]], gradients, global_tensor(size, dim, 2), dim, sharding)


def test_exchange_on_real_processes() -> None:
    cases = [(0, "uneven", 1, "fused"), (1, "even", 0, "empty")]

    results = run_processes(3, exchange_all, 3, cases)

    for at, (a, source, b, target) in enumerate(cases):
        (value, gradient), from_cut, to_shard = exchange_case(a, source, b, target)
        check("S", [ranks[at][0] for ranks in results], value, b, to_shard)
        check("S", [ranks[at][1] for ranks in results], gradient, a, from_cut)

"""A reshard and its products in one call compute what they compute one after the other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.layout import Axis, Block, Mesh, Shard
from shardwright.runtime import all_gather_linear, all_gather_linears, replicate_linear, replicate_linears
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Group, Groups
from tests.runtime.ranks import run_ranks

UNEVEN = Shard(axis="tp", blocks=(Block(1, 5, 1),))


def group_of(n: int) -> Group:
    return Groups(Mesh(axes=(Axis(name="tp", size=n),)))["tp"]


def tensors(seed: int, *shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def both_ways(rank: int, n: int, gathers: bool, sharding: Shard | None, count: int, bias: bool, frozen: bool) -> list:
    """(outputs and gradients in one call, the same one after the other, collectives of each)."""
    group, collected = group_of(n), []
    rows = sharding.local(n, rank) if sharding is not None else 6
    for joined in (True, False):
        (x,) = tensors(rank if gathers else 99, (3, rows, 4))
        weights = tensors(10 + rank, *[(5 + at, 4) for at in range(count)])
        biases = tensors(20 + rank, *[(5 + at,) for at in range(count)]) if bias else None
        leaves = [x, *weights[frozen:], *(biases or [])]
        for leaf in leaves:
            leaf.requires_grad_()
        with comm.recording() as issued:
            if joined and gathers:
                built = all_gather_linears(x, 1, group, weights, biases, sharding)
            elif joined:
                built = replicate_linears(x, group, weights, biases)
            else:
                whole = comm.all_gather(x, 1, group, sharding, dst=comm.R) if gathers else comm.replicate(x, group)
                built = tuple(
                    torch.nn.functional.linear(whole, w, biases[at] if biases else None) for at, w in enumerate(weights)
                )
            sum((y * y).sum() for y in built).backward()
        collected.append(([*(y.detach() for y in built), *(leaf.grad for leaf in leaves)], issued))
        assert weights[0].requires_grad is not frozen
    return collected


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize(("count", "bias"), [(1, True), (1, False), (3, True), (3, False)])
@pytest.mark.parametrize(("gathers", "sharding"), [(False, None), (True, None), (True, UNEVEN)])
def test_one_call_is_the_reshard_and_then_the_products(gathers, sharding, count, bias, frozen) -> None:
    for (result, sent), (expected, message) in run_ranks(2, both_ways, 2, gathers, sharding, count, bias, frozen):
        assert sent == message
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-13, atol=1e-13)


def single(rank: int) -> bool:
    group = group_of(2)
    x, w, b = (tensor.requires_grad_() for tensor in tensors(1, (2, 4), (3, 4), (3,)))
    y = replicate_linear(x, group, w, b)
    z = all_gather_linear(x, 0, group, w, b)
    return torch.equal(y.detach(), torch.nn.functional.linear(x, w, b)) and z.shape == (4, 3)


def test_one_layer_is_given_by_its_weight_and_bias() -> None:
    assert all(run_ranks(2, single))


def unused(rank: int) -> list:
    x, w, v = (tensor.requires_grad_() for tensor in tensors(1, (2, 4), (3, 4), (5, 4)))
    first, _ = replicate_linears(x, group_of(2), [w, v])
    first.sum().backward()
    return [w.grad is not None, v.grad is None, x.grad.isfinite().all()]


def test_a_product_that_nobody_uses_gives_its_weight_no_gradient() -> None:
    assert all(map(all, run_ranks(2, unused)))


def narrow(rank: int) -> list:
    group, collected = group_of(2), []
    for joined in (True, False):
        x, w, b = (tensor.float().requires_grad_() for tensor in tensors(1, (6, 4), (3, 4), (3,)))
        with torch.autocast("cpu", torch.bfloat16):
            y = (
                replicate_linear(x, group, w, b)
                if joined
                else torch.nn.functional.linear(comm.replicate(x, group), w, b)
            )
        y.float().square().sum().backward()
        collected.append([y.detach(), x.grad, w.grad, b.grad])
    return collected


def test_under_autocast_products_are_narrow_and_gradients_have_the_dtype_of_their_leaf() -> None:
    for result, expected in run_ranks(2, narrow):
        assert [x.dtype for x in result] == [torch.bfloat16, torch.float32, torch.float32, torch.float32]
        for x, y in zip(result, expected, strict=True):
            torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        torch.testing.assert_close(result[1], expected[1], rtol=1e-6, atol=1e-6)


def narrow_pair(rank: int) -> list:
    """The gradient of a value that two products read, whose products are narrower than it is; and of each by itself."""
    group, collected = group_of(2), []
    for used in ((0, 1), (0,), (1,)):
        x, *weights = (tensor.float().requires_grad_() for tensor in tensors(1, (6, 4), (3, 4), (5, 4)))
        with torch.autocast("cpu", torch.bfloat16):
            built = replicate_linears(x, group, weights)
        sum(built[at].float().sum() for at in used).backward()
        collected.append(x.grad)
    return collected


def test_under_autocast_the_gradients_of_several_products_are_added() -> None:
    for both, first, second in run_ranks(2, narrow_pair):
        torch.testing.assert_close(both, first + second, rtol=1e-6, atol=1e-6)


def in_place(rank: int) -> list:
    group = group_of(2)
    (x,) = tensors(rank, (4, 3))
    leaf = x.clone().requires_grad_()
    built = leaf * 2
    summed = comm.all_reduce_(built, group)
    summed.square().sum().backward()
    return [summed.data_ptr() == built.data_ptr(), 2 * x, summed.detach(), leaf.grad]


def test_a_sum_in_place_is_a_sum_and_passes_its_gradient() -> None:
    ranks = run_ranks(2, in_place)
    total = sum(part for _, part, _, _ in ranks)
    for same_memory, _, summed, gradient in ranks:
        assert same_memory
        torch.testing.assert_close(summed, total)
        torch.testing.assert_close(gradient, 4 * total)


def kept(rank: int) -> str:
    (x,) = tensors(rank, (4,))
    built = x.requires_grad_().exp()  # its backward reads the result
    summed = comm.all_reduce_(built, group_of(2))
    try:
        summed.sum().backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_sum_in_place_of_what_backward_needs_is_refused() -> None:
    assert all("modified by an inplace operation" in message for message in run_ranks(2, kept))

"""Batch norm over split rows against torch's on the whole batch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shardwright.layout import Axis, Mesh, chunk_bounds
from shardwright.runtime.algorithms.norms import batch_norm
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Groups
from tests.runtime.ranks import run_ranks

NormResult = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def on_rank(rank: int, n: int, x: Tensor, affine: bool) -> tuple[NormResult, list[str]]:
    dp = Groups(Mesh(axes=(Axis(name="dp", size=n),)))["dp"]
    mine = x.narrow(0, *chunk_bounds(x.shape[0], n, rank)).clone().requires_grad_()
    weight, bias, mean, var = parameters(x.dtype, affine)
    before = mean.clone(), var.clone()
    with comm.recording() as issued:
        y, new_mean, new_var = batch_norm(mine, weight, bias, mean, var, 0.3, 1e-5, dp)
        (y.sin() * y).sum().backward()
    assert torch.equal(mean, before[0])
    assert torch.equal(var, before[1])
    assert mine.grad is not None
    assert new_mean is not None
    assert new_var is not None
    zero = torch.zeros(3, dtype=x.dtype)
    dweight = zero if weight is None or weight.grad is None else weight.grad
    dbias = zero if bias is None or bias.grad is None else bias.grad
    return (y.detach(), mine.grad, dweight, dbias, new_mean, new_var), [kind for kind, _, _ in issued]


def parameters(dtype: torch.dtype, affine: bool) -> tuple[Tensor | None, Tensor | None, Tensor, Tensor]:
    weight = torch.tensor([0.5, -1.0, 2.0], dtype=dtype, requires_grad=True) if affine else None
    bias = torch.tensor([0.1, 0.2, 0.3], dtype=dtype, requires_grad=True) if affine else None
    return weight, bias, torch.full((3,), 0.2, dtype=dtype), torch.full((3,), 1.5, dtype=dtype)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize(("n", "shape"), [(2, (6, 3)), (3, (7, 3, 2, 2)), (4, (5, 3, 4))])
def test_batch_norm_is_the_one_of_the_whole_batch(n: int, shape: tuple[int, ...], affine: bool) -> None:
    x = torch.randn(shape, dtype=torch.float64) * 3 + 100

    results = run_ranks(n, on_rank, n, x, affine)

    whole = x.clone().requires_grad_()
    weight, bias, mean, var = parameters(x.dtype, affine)
    y, _, _, new_mean, new_var = torch.ops.aten._native_batch_norm_legit_functional(
        whole, weight, bias, mean, var, True, 0.3, 1e-5
    )
    (y.sin() * y).sum().backward()
    zero = torch.zeros(3, dtype=x.dtype)
    collected = [result for result, _ in results]
    close(torch.cat([item[0] for item in collected]), y)
    close(torch.cat([item[1] for item in collected]), whole.grad)
    close(sum(item[2] for item in collected), weight.grad if weight is not None else zero)
    close(sum(item[3] for item in collected), bias.grad if bias is not None else zero)
    for value in collected:
        close(value[4], new_mean)
        close(value[5], new_var)
    assert all(issued == ["all_gather", "all_reduce"] for _, issued in results)


def penalty(y: Tensor, x: Tensor, *others: Tensor) -> list[Tensor]:
    """What a gradient penalty gives back: the gradients of squared gradients."""
    first = torch.autograd.grad((y.sin() * y).sum(), [x, *others], create_graph=True)
    return list(torch.autograd.grad(first[0].square().sum(), [x, *others]))


@pytest.mark.parametrize("n", [1, 2])
def test_the_gradient_of_its_gradient_is_the_one_of_the_whole_batch(n: int) -> None:
    x = torch.randn(6, 3, 2, dtype=torch.float64)

    def body(rank: int) -> list[Tensor]:
        dp = Groups(Mesh(axes=(Axis(name="dp", size=n),)))["dp"] if n > 1 else None
        mine = x.narrow(0, *chunk_bounds(6, n, rank)).clone().requires_grad_()
        weight, bias, mean, var = parameters(x.dtype, True)
        y, _, _ = batch_norm(mine, weight, bias, mean, var, 0.3, 1e-5, dp)
        return penalty(y, mine, weight, bias)

    results = run_ranks(n, body)
    whole = x.clone().requires_grad_()
    weight, bias, _, _ = parameters(x.dtype, True)
    y = torch.nn.functional.batch_norm(whole, None, None, weight, bias, training=True)
    wanted = penalty(y, whole, weight, bias)
    close(torch.cat([value[0] for value in results]), wanted[0])
    for at in (1, 2):
        close(sum(value[at] for value in results), wanted[at])


def close(actual: Tensor | int, expected: Tensor | None) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_one_device_and_no_buffers() -> None:
    x = torch.randn(5, 3, dtype=torch.float64)

    y, mean, var = batch_norm(x, None, None, None, None, 0.1, 1e-5)

    close(y, torch.nn.functional.batch_norm(x, None, None, training=True))
    assert mean is None
    assert var is None


def test_half_precision_keeps_its_dtype() -> None:
    x = torch.randn(50, 3)
    y, _, _ = batch_norm(x.bfloat16(), None, None, None, None, 0.1, 1e-5)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(
        y.float(), torch.nn.functional.batch_norm(x, None, None, training=True), rtol=0, atol=0.05
    )

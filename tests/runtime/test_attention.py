"""Attention by a structure, as generated code calls it, against attention with the mask that it stands for."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardwright import runtime
from shardwright.errors import InputError

LENGTH = 20


def tensors(dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(2, heads, LENGTH, 8, dtype=dtype, requires_grad=True) for heads in (4, 2, 2)]


def window() -> Tensor:
    places = torch.arange(LENGTH)
    return (places[None] <= places[:, None]) & (places[None] >= places[:, None] - 4)


def test_a_query_that_sees_nothing_is_what_it_is_with_a_boolean_mask() -> None:
    padding = torch.arange(LENGTH) >= torch.tensor([0, 6])[:, None]
    mask = window() & padding[:, None, None]
    results, gradients = [], []
    for attend in (
        lambda q, k, v: runtime.attention(q, k, v, before=4, after=0, padding=padding),
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True),
    ):
        leaves = tensors()
        results.append(attend(*leaves))
        results[-1].square().sum().backward()
        gradients.append([leaf.grad for leaf in leaves])
    assert bool((results[0][1, :, :6] == 0).all())
    torch.testing.assert_close(*results, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(*gradients, rtol=0.0, atol=1e-12)


def test_documents_of_queries_and_of_keys() -> None:
    q, k, v = (x.detach() for x in tensors())
    ids = torch.arange(LENGTH).div(7, rounding_mode="floor")[None]
    together = runtime.attention(q, k, v, after=0, documents=ids)
    parts = [
        runtime.attention(q[:, :, part], k, v, documents=(ids[:, part], ids)) for part in (slice(7), slice(7, None))
    ]
    both_ways = runtime.attention(q, k, v, documents=ids)
    torch.testing.assert_close(torch.cat(parts, 2), both_ways, rtol=0.0, atol=1e-12)
    torch.testing.assert_close(
        together[:, :, 7:14], runtime.attention(*(x[:, :, 7:14] for x in (q, k, v)), after=0), rtol=0.0, atol=1e-12
    )


def test_under_autocast_it_computes_as_torch_does() -> None:
    leaves = tensors(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        actual = runtime.attention(*leaves, before=4, after=0)
        expected = F.scaled_dot_product_attention(*leaves, window(), enable_gqa=True)
    assert actual.dtype is expected.dtype is torch.bfloat16
    torch.testing.assert_close(actual, expected, rtol=2e-2, atol=2e-2)
    actual.float().sum().backward()
    assert all(leaf.grad is not None and leaf.grad.dtype is torch.float32 for leaf in leaves)


def test_gradients_by_finite_differences() -> None:
    leaves = [x.detach()[:, :, :6].clone().requires_grad_() for x in tensors()]
    assert torch.autograd.gradcheck(lambda *x: runtime.attention(*x, before=2, after=1, scale=0.3), leaves)


def test_second_derivatives_are_there_without_fused_kernels() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        leaves = [x.detach()[:, :, :5].clone().requires_grad_() for x in tensors()]
        assert torch.autograd.gradgradcheck(lambda *x: runtime.attention(*x, before=2, after=1), leaves)
    with pytest.raises(InputError, match=r"create_graph=True.*run the step under .*MATH"):
        torch.autograd.grad(runtime.attention(*leaves, after=0).sum(), leaves[:1], create_graph=True)


def test_a_window_larger_than_the_sequence_is_no_window() -> None:
    q, k, v = (x.detach() for x in tensors())
    causal = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(runtime.attention(q, k, v, before=999, after=0), causal, rtol=0.0, atol=1e-12)


def test_it_is_an_op_of_torch() -> None:
    leaves = tensors()
    op = torch.ops.shardwright.attention.default
    torch.testing.assert_close(op(*leaves, before=4, after=0), runtime.attention(*leaves, before=4, after=0))
    shape = op(*(x.detach().to("meta") for x in leaves), after=0)
    assert (shape.shape, shape.device.type) == ((2, 4, LENGTH, 8), "meta")

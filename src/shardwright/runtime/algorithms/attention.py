"""Attention whose mask is known by what it means: a window, a prefix, documents, padding. No mask of all pairs is made.

Generated code calls `attention`. The same function is an op of torch, `torch.ops.shardwright.attention`, since graphs
have it too and are run op by op.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError

from .attention_blocks import Places, Visibility, attend, attend_backward, dense_mask


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    before: int | None = None,
    after: int | None = None,
    prefix: int = 0,
    documents: Tensor | tuple[Tensor, Tensor] | None = None,
    padding: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` of [B, H, S, E] with the mask that `Visibility` describes; GQA by its shapes.

    `documents` are ids [B, S], or a pair of them for queries and for keys. A query that sees no key gives 0, as it does
    with a boolean mask.
    """
    of_queries, of_keys = documents if isinstance(documents, tuple) else (documents, documents)
    visible = Visibility(before, after, prefix, of_queries, of_keys, padding)
    device = query.device.type
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return _apply(query, key, value, visible, scale)
    dtype = torch.get_autocast_dtype(device)
    query, key, value = (x if x.dtype is torch.float64 else x.to(dtype) for x in (query, key, value))
    with torch.autocast(device, enabled=False):  # inputs are cast, as torch casts those of attention, and no more
        return _apply(query, key, value, visible, scale)


def _apply(query: Tensor, key: Tensor, value: Tensor, visible: Visibility, scale: float | None) -> Tensor:
    if not torch._C._get_flash_sdp_enabled():  # of all devices: `sdpa_kernel(SDPBackend.MATH)`
        mask = dense_mask(*_everywhere(query, key), visible, query.device)
        return F.scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=True)
    data = (visible.query_documents, visible.key_documents, visible.padding)
    result: Tensor = _Attention.apply(query, key, value, *data, visible, scale)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    """The tensors of `visible` are arguments too, so that autograd looks after them."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, of_queries: Tensor | None, of_keys: Tensor | None,
        padding: Tensor | None, visible: Visibility, scale: float | None,
    ) -> Tensor:  # fmt: skip
        out, lse = attend(q, k, v, *_everywhere(q, k), visible, scale)
        ctx.save_for_backward(q, k, v, out, lse, of_queries, of_keys, padding)
        ctx.limits, ctx.scale = (visible.before, visible.after, visible.prefix), scale
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, *data = ctx.saved_tensors
        visible = Visibility(*ctx.limits, *data)
        gradients = _Gradients.apply(grad, q, k, v, out.detach(), lse, visible, ctx.scale)  # type: ignore[no-untyped-call]
        return (*gradients, *(None,) * 5)


class _Gradients(torch.autograd.Function):
    """What backward computes, which has no gradient itself: torch's fused kernels have none either."""

    @staticmethod
    def forward(
        ctx: Any, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, visible: Visibility,
        scale: float | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return attend_backward(grad, q, k, v, out, lse, *_everywhere(q, k), visible, scale)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        raise InputError(
            "fused attention has no second derivative; run the step under "
            "torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)"
        )


def _everywhere(q: Tensor, k: Tensor) -> tuple[Places, Places]:
    return Places(0, 1, q.shape[2]), Places(0, 1, k.shape[2])


def _attention_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_documents: Tensor | None = None,
    key_documents: Tensor | None = None,
    padding: Tensor | None = None,
    before: int | None = None,
    after: int | None = None,
    prefix: int = 0,
    scale: float | None = None,
) -> Tensor:
    documents = None if query_documents is None or key_documents is None else (query_documents, key_documents)
    return attention(
        query, key, value, before=before, after=after, prefix=prefix, documents=documents, padding=padding, scale=scale
    )


_LIBRARY = torch.library.Library("shardwright", "DEF")  # type: ignore[no-untyped-call]
_LIBRARY.define(  # type: ignore[no-untyped-call]
    "attention(Tensor query, Tensor key, Tensor value, Tensor? query_documents=None, Tensor? key_documents=None, "
    "Tensor? padding=None, int? before=None, int? after=None, int prefix=0, float? scale=None) -> Tensor"
)
_LIBRARY.impl("attention", _attention_op, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]

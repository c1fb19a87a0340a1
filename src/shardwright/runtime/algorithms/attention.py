"""Attention whose mask is known by what it means: a window, a prefix, documents, padding. No mask of all pairs is made.

Generated code calls `attention`. The same function is an op of torch, `torch.ops.shardwright.attention`, since graphs
have it too and are run op by op.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention_blocks import Places, Visibility
from .context_attention import AttentionCall, Documents, attend_blocks


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    before: int | None = None,
    after: int | None = None,
    prefix: int = 0,
    documents: Documents | None = None,
    padding: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """`F.scaled_dot_product_attention` of [B, H, S, E] with the mask that `Visibility` describes; GQA by its shapes.

    `documents` are ids [B, S], or a pair of them for queries and for keys. A query that sees no key gives 0, as it does
    with a boolean mask.
    """
    of_queries, of_keys = documents if isinstance(documents, tuple) else (documents, documents)
    visible = Visibility(before, after, prefix, of_queries, of_keys, padding)
    queries, keys = (Places(0, 1, x.shape[2]) for x in (query, key))
    return attend_blocks(query, key, value, AttentionCall(queries, (keys,), visible, scale))


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

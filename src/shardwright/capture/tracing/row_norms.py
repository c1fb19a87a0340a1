"""`Embedding(max_norm=...)` while a model is traced, written with ops that can be split.

The rows of a table that are looked up are scaled down in place where their norm is too large, by one op that sees all
indices and all of each row. Here the indices are counted and the norms are sums, so that ranks may have some of either.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..user_calls.kept import KeptCalls, current

EPSILON = 1e-7  # of torch's kernels


@contextmanager
def traceable_row_norms(user_calls: KeptCalls) -> Iterator[None]:
    """For the length of a trace, rows are renormalized by ops that can be seen."""
    functions: Any = torch
    renormalize = functions.embedding_renorm_

    def renormalize_seen(input: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
        if current() is not user_calls:
            result: Tensor = renormalize(input, indices, max_norm, norm_type)
            return result
        with torch.no_grad():
            return input.mul_(_scales(input, indices.reshape(-1), max_norm, norm_type).unsqueeze(1))

    try:
        functions.embedding_renorm_ = renormalize_seen
        yield
    finally:
        functions.embedding_renorm_ = renormalize


def _scales(table: Tensor, indices: Tensor, max_norm: float, norm_type: float) -> Tensor:
    """A factor for each row: 1 for what is not looked up, and for what is short enough."""
    counts = torch.zeros(table.shape[0], dtype=torch.int32, device=table.device)
    counts = counts.index_add(0, indices, torch.ones_like(indices, dtype=torch.int32))
    norms = _row_norms(table, norm_type).to(table.dtype).double()
    scales = torch.where((counts > 0) & (norms > max_norm), max_norm / (norms + EPSILON), 1.0)
    return scales.float() if table.dtype in (torch.float16, torch.bfloat16) else scales.to(table.dtype)


def _row_norms(table: Tensor, norm_type: float) -> Tensor:
    """The norm of each row, in float32 at least."""
    sizes = (table.float() if table.dtype in (torch.float16, torch.bfloat16) else table).abs()
    if math.isinf(norm_type):
        return sizes.amax(1) if norm_type > 0 else sizes.amin(1)
    if norm_type == 0:
        return (sizes != 0).to(sizes.dtype).sum(1)
    if norm_type == 1:
        return sizes.sum(1)
    if norm_type == 2:
        return sizes.square().sum(1).sqrt()
    return sizes.pow(norm_type).sum(1).pow(1 / norm_type)

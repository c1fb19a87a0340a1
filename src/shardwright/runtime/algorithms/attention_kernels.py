"""The kernels of attention that give the log-sum-exp of scores: the only place that knows of devices.

    cpu     torch's flash attention; q, k and v of one width
    cuda    torch's flash attention without a mask (untested: there was no such device), matmuls with one
    others  matmuls, for at most `CHUNK` queries at a time

A row whose mask hides all keys has a result of 0, and gradients of 0. Its log-sum-exp is 0 or -inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import accelerator

CHUNK = 128
"""Queries that share one small mask (also in `ops/attention.py`, for the memory that it takes)."""


@dataclass(frozen=True, slots=True)
class BlockKernel:
    """How attention is computed on a device; `fused` kernels take rectangles of any size."""

    device: str
    fused: bool
    precision: torch.dtype
    scale: float

    @classmethod
    def of(cls, q: Tensor, v: Tensor, scale: float | None) -> BlockKernel:
        same_width = q.shape[-1] == v.shape[-1] > 0 and 0 not in q.shape
        half = q.dtype in (torch.float16, torch.bfloat16)
        fused = same_width and (
            q.device.type == "cpu" or (accelerator.flashes(q.device) and half and q.shape[-1] % 8 == 0)
        )
        precision = torch.promote_types(q.dtype, torch.float32)
        return cls(q.device.type, fused, precision, 1 / math.sqrt(max(q.shape[-1], 1)) if scale is None else scale)

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, seen: Tensor | None) -> tuple[Tensor, Tensor]:
        if self.fused and self.device == "cpu":
            q, k, v = (_dense_rows(x) for x in (q, k, v))
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=_additive(seen, q.dtype), scale=self.scale
            )
            return out, lse
        if self.fused and seen is None:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, scale=self.scale)
            return out, lse
        scores = self._scores(q, k, causal, seen)
        lse = scores.logsumexp(-1)
        weights = torch.exp(scores - finite(lse).unsqueeze(-1))
        return (weights @ _grouped(v, k, self.precision)).flatten(1, 2).to(q.dtype), lse.flatten(1, 2)

    def backward(
        self, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, causal: bool,
        seen: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        if self.fused and self.device == "cpu":
            grad_out, q, k, v, out = (_dense_rows(x) for x in (grad_out, q, k, v, out))
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad_out, q, k, v, out, lse, 0.0, causal, attn_mask=_additive(seen, q.dtype), scale=self.scale
            )
            return dq, dk, dv
        if self.fused and seen is None:
            nothing = torch.empty(0, dtype=torch.int64, device=q.device)  # there are no random numbers
            dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
                grad_out, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, nothing, nothing,
                scale=self.scale,
            )  # fmt: skip
            return dq, dk, dv
        weights = torch.exp(self._scores(q, k, causal, seen) - _grouped(lse, k, self.precision).unsqueeze(-1))
        grad = _grouped(grad_out, k, self.precision)
        delta = (grad * _grouped(out, k, self.precision)).sum(-1, keepdim=True)
        grad_scores = weights * (grad @ _grouped(v, k, self.precision).mT - delta) * self.scale
        dq = grad_scores @ _grouped(k, k, self.precision)
        dk = grad_scores.mT @ _grouped(q, k, self.precision)
        dv = weights.mT @ grad
        return dq.flatten(1, 2).to(q.dtype), dk.sum(2).to(k.dtype), dv.sum(2).to(v.dtype)

    def _scores(self, q: Tensor, k: Tensor, causal: bool, seen: Tensor | None) -> Tensor:
        """[B, KV heads, heads of a group, queries, keys]."""
        scores = _grouped(q, k, self.precision) @ _grouped(k, k, self.precision).mT * self.scale
        if causal:
            seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        if seen is None:
            return scores
        if not causal:  # heads of a mask, if it has them, are those of queries
            seen = _grouped(seen, k, seen.dtype) if seen.shape[1] > 1 else seen.unsqueeze(2)
        return scores.masked_fill(~seen, -math.inf) if seen.dtype is torch.bool else scores + seen


def _grouped(x: Tensor, k: Tensor, precision: torch.dtype) -> Tensor:
    """Heads as [KV heads, heads of a group]."""
    return x.reshape(x.shape[0], k.shape[1], -1, *x.shape[2:]).to(precision)


def _dense_rows(x: Tensor) -> Tensor:
    """The kernel reads the elements of a row one after the other."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _additive(seen: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """A mask as the kernel takes it: what is added to scores."""
    if seen is None or seen.dtype is not torch.bool:
        return seen
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -math.inf)


def finite(lse: Tensor) -> Tensor:
    """For rows that see nothing any number will do: their weights are exp(-inf - it)."""
    return lse.masked_fill(lse == -math.inf, 0.0)

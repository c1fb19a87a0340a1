"""Batch norm over a batch that is split: statistics of the global batch, exactly.

Each rank sends how many values it has a channel, their mean and their squared distance
from it; from these the mean and variance of the global batch follow without loss of
precision, in one collective, whether or not the ranks have equally many samples:

    mean = sum_r n_r mean_r / n
    var  = sum_r (m2_r + n_r (mean_r - mean)^2) / n

Backward needs two sums over the whole batch for each channel, in one collective:

    dx = w / std (dy - sum(dy) / n - xhat sum(dy xhat) / n)

The gradients of weight and bias are left as sums over this rank's samples: the parameter's
own synchronisation adds them. Buffers are not written: the caller applies what returns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..collectives import comm
from ..faults import flight_recorder
from ..world import Group

Statistics = tuple[Tensor, Tensor, Tensor]
"""How many values a channel has in the global batch, their mean, their variance."""


def batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
    eps: float,
    group: Group | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The normalized samples of this rank, and the buffers as they should become (momentum None keeps them)."""
    statistics = values, mean, var = _statistics(x.detach(), group)
    y: Tensor = _Normalize.apply(x, weight, bias, statistics, group, eps)  # type: ignore[no-untyped-call]
    unbiased = var * (values / (values - 1))
    return y, _moved(running_mean, mean, momentum), _moved(running_var, unbiased, momentum)


def _moved(buffer: Tensor | None, seen: Tensor, momentum: float | None) -> Tensor | None:
    if buffer is None or momentum is None:
        return buffer
    return ((1 - momentum) * buffer + momentum * seen).to(buffer.dtype)


def _statistics(x: Tensor, group: Group | None) -> Statistics:
    x = _wide(x)
    dims = _not_channels(x)
    n = x.numel() // max(x.shape[1], 1)
    mean = x.sum(dims) / max(n, 1)
    m2 = (x - _channels(mean, x)).square().sum(dims)
    if group is None or group.process_group is None:
        return mean.new_tensor(float(n)), mean, m2 / n
    mine = torch.stack([torch.full_like(mean, n), mean, m2])
    counts, means, distances = comm.all_gather(mine.unsqueeze(0), 0, group).unbind(1)
    values = counts[:, 0].sum()
    mean = (counts * means).sum(0) / values
    return values, mean, (distances + counts * (means - mean).square()).sum(0) / values


class _Normalize(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std are made of the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        group: Group | None,
        eps: float,
    ) -> Tensor:
        values, mean, var = statistics
        rstd = torch.rsqrt(var + eps)
        ctx.save_for_backward(x, weight, values, mean, rstd)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        ctx.place, ctx.eps = flight_recorder.here(), eps
        scale = rstd if weight is None else rstd * weight
        y = (_wide(x) - _channels(mean, x)) * _channels(scale, x)
        return (y if bias is None else y + _channels(bias, x)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _gradient_of_normed(ctx, gradient)
        x, weight, values, mean, rstd = ctx.saved_tensors
        dims = _not_channels(x)
        dy = _wide(gradient)
        xhat = (_wide(x) - _channels(mean, x)) * _channels(rstd, x)
        sums = torch.stack([dy.sum(dims), (dy * xhat).sum(dims)])
        dbias, dweight = sums.unbind()
        dx = None
        if ctx.needs_input_grad[0]:
            before = flight_recorder.within(ctx.place)
            total = (
                sums
                if ctx.group is None or ctx.group.process_group is None
                else comm.all_reduce_no_grad(sums, ctx.group)
            )
            flight_recorder.within(before)
            mean_dy, mean_dy_xhat = (total / values).unbind()
            scale = rstd if weight is None else rstd * weight
            dx = (dy - _channels(mean_dy, x) - xhat * _channels(mean_dy_xhat, x)) * _channels(scale, x)
        return (
            None if dx is None else dx.to(x.dtype),
            None if weight is None else dweight.to(weight.dtype),
            None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype),
            *(None,) * 3,
        )


def _gradient_of_normed(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The same made of ops that have a gradient, for `create_graph`: mean and variance are taken again, of all rows."""
    x, weight, values, _, _ = ctx.saved_tensors
    dims, dy, wide = _not_channels(x), _wide(gradient), _wide(x)

    def mean_over_all(sums: Tensor) -> Tensor:
        total = sums if ctx.group is None else comm.all_reduce(sums, ctx.group, dst=comm.R)
        return _channels(total / values, x)

    apart = wide - mean_over_all(wide.sum(dims))
    rstd = torch.rsqrt(mean_over_all(apart.square().sum(dims)) + ctx.eps)
    xhat = apart * rstd
    of_bias, of_weight = dy.sum(dims), (dy * xhat).sum(dims)
    dx = (dy - mean_over_all(of_bias) - xhat * mean_over_all(of_weight)) * rstd
    dx = dx if weight is None else dx * _channels(weight, x)
    return (
        dx.to(x.dtype) if ctx.needs_input_grad[0] else None,
        None if weight is None else of_weight.to(weight.dtype),
        None if ctx.bias_dtype is None else of_bias.to(ctx.bias_dtype),
        *(None,) * 3,
    )


def _wide(x: Tensor) -> Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _not_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _channels(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *(1,) * (x.ndim - 2))

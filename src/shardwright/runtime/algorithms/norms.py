"""Batch norm over a batch that is split: statistics of the global batch, exactly.

Each rank sends how many values it has a channel, their mean and their variance; from these
the mean and variance of the global batch follow without loss of precision, in one collective,
whether or not the ranks have equally many samples:

    mean = sum_r n_r mean_r / n
    var  = sum_r n_r (var_r + (mean_r - mean)^2) / n

Backward needs two sums over the whole batch for each channel, in one collective, beside which the
first term is computed:

    dx = w / std (dy - sum(dy) / n - xhat sum(dy xhat) / n)

All passes over x and dy are torch's own kernels for batch norms: of one rank, or with fixed
statistics. Statistics of a rank alone, where its batch is the global one or is to be normalized by
itself (`batch_norm="local"`), send nothing.

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
    if group is None or group.process_group is None:
        return _of_this_rank(x, weight, bias, running_mean, running_var, momentum, eps)
    statistics = values, mean, var = _statistics(_wide(x.detach()), group)
    y: Tensor = _Normalize.apply(x, weight, bias, statistics, group, eps)  # type: ignore[no-untyped-call]
    unbiased = var * (values / (values - 1))
    return y, _moved(running_mean, mean, momentum), _moved(running_var, unbiased, momentum)


def _moved(buffer: Tensor | None, seen: Tensor, momentum: float | None) -> Tensor | None:
    if buffer is None or momentum is None:
        return buffer
    return torch.lerp(buffer, seen.to(buffer.dtype), momentum)


def _of_this_rank(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float | None,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """torch's own kernel, on copies of the buffers."""
    moves = running_mean is not None and running_var is not None and momentum is not None
    mean, var = (running_mean.clone(), running_var.clone()) if moves else (None, None)  # type: ignore[union-attr]
    y = torch.batch_norm(x, weight, bias, mean, var, True, momentum or 0.0, eps, torch.backends.cudnn.enabled)
    return (y, mean, var) if moves else (y, running_mean, running_var)


def _statistics(x: Tensor, group: Group) -> Statistics:
    if x.numel():
        mean, var = torch.batch_norm_update_stats(x, None, None, 0.0)
    else:  # a rank without samples
        mean = var = x.new_zeros(x.shape[1])
    n = x.numel() // max(x.shape[1], 1)
    mine = torch.stack([torch.full_like(mean, n), mean, var])
    counts, means, variances = comm.all_gather(mine.unsqueeze(0), 0, group).unbind(1)
    values = counts[:, 0].sum()
    mean = (counts * means).sum(0) / values
    return values, mean, (counts * (variances + (means - mean).square())).sum(0) / values


def _affine(x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias in one pass: what a batch norm does in eval mode."""
    return torch.batch_norm(x, weight, bias, mean, var, False, 0.0, eps, False)


def _channel_sums(dy: Tensor, x: Tensor, mean: Tensor, var: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """sum(dy xhat) and sum(dy): the gradients of weight and bias of a batch norm with fixed statistics."""
    if not x.numel():  # a rank without samples; torch's kernel would crash
        return torch.zeros_like(mean), torch.zeros_like(mean)
    _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
        dy, x, None, mean, var, None, None, False, eps, [False, True, True]
    )
    return dweight, dbias


class _Normalize(torch.autograd.Function):
    """(x - mean) / std * weight + bias, where mean and std are made of the x of all ranks."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: Statistics,
        group: Group,
        eps: float,
    ) -> Tensor:
        values, mean, var = statistics
        ctx.save_for_backward(x, weight, values, mean, var)
        ctx.group, ctx.bias_dtype = group, None if bias is None else bias.dtype
        ctx.place, ctx.eps = flight_recorder.here(), eps
        return _affine(_wide(x), _like(weight, mean), _like(bias, mean), mean, var, eps).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _gradient_of_normed(ctx, gradient)
        x, weight, values, mean, var = ctx.saved_tensors
        dy, wide = _wide(gradient), _wide(x)
        scale = torch.rsqrt(var + ctx.eps) if weight is None else torch.rsqrt(var + ctx.eps) * weight
        dweight, dbias = _channel_sums(dy, wide, mean, var, ctx.eps)
        dx = None
        if ctx.needs_input_grad[0]:
            before = flight_recorder.within(ctx.place)
            total = comm.all_reduce_async(torch.stack([dbias, dweight]), ctx.group)
            dx = dy * _channels(scale, x)  # while the sums are under way
            mean_dy, mean_dy_xhat = (total() / -values * scale).unbind()
            flight_recorder.within(before)
            dx += _affine(wide, mean_dy_xhat, mean_dy, mean, var, ctx.eps)
        return (
            None if dx is None else dx.to(x.dtype),
            None if weight is None else dweight.to(weight.dtype),
            None if ctx.bias_dtype is None else dbias.to(ctx.bias_dtype),
            *(None,) * 3,
        )


def _gradient_of_normed(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    """The same of ops that have a gradient, for `create_graph`: mean and variance are taken anew, of all samples."""
    x, weight, values, _, _ = ctx.saved_tensors
    dims, dy, wide = _not_channels(x), _wide(gradient), _wide(x)

    def mean_over_all(sums: Tensor) -> Tensor:
        total = comm.all_reduce(sums, ctx.group, dst=comm.R)
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


def _like(per_channel: Tensor | None, mean: Tensor) -> Tensor | None:
    return None if per_channel is None else per_channel.to(mean.dtype)


def _not_channels(x: Tensor) -> list[int]:
    return [dim for dim in range(x.ndim) if dim != 1]


def _channels(per_channel: Tensor, x: Tensor) -> Tensor:
    return per_channel.view(-1, *(1,) * (x.ndim - 2))

"""Losses whose mean is over the global batch, and cross entropy over split classes.

A mean over labels that count is a ratio of two sums, so with samples split over a group no
rank can take it alone. Each returns its **share**, the local sum divided by the global
count; the shares add up to the exact mean, also when one rank has no label that counts.

With classes split, no rank ever holds a whole row of logits. The softmax needs two sums
over the group, of numbers one per row:

    m = max_c x_c                                    all_reduce max
    s = sum_c exp(x_c - m),  z = x_target - m        all_reduce sum, in one
    loss = w_target (log s - z)
    dx_c = w_target (exp(x_c - m) / s - [c is target])

and with label smoothing e over C classes (1 - e) of this plus e / C times the same loss
summed over all classes as target. Logits are kept for backward, the softmax is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError, LayoutError
from shardwright.layout import Shard

from ..collectives import blocks
from ..collectives.comm import R, all_reduce, all_reduce_async, all_reduce_no_grad, replicate
from ..world import Group

Average = Literal["mean", "sum", "none"]
Count = Tensor | float | Callable[[], Tensor]


def cross_entropy(
    logits: Tensor,
    target: Tensor,
    *,
    samples: Group | None = None,
    classes: Group | None = None,
    sharding: Shard | None = None,
    size: int | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Average = "mean",
    label_smoothing: float = 0.0,
    count: Count | None = None,
    reduced: bool = False,
) -> Tensor:
    """`F.cross_entropy`: over `samples` a share of the mean, over `classes` whole. `weight` is the whole vector.

    With `reduced` the mean itself, for which loss and count are summed over `samples` at once.
    """
    if classes is None or classes.process_group is None:
        how: Average = "sum" if reduction == "mean" else reduction
        total = F.cross_entropy(
            _wide(logits, how),
            target,
            weight,
            ignore_index=ignore_index,
            reduction=how,
            label_smoothing=label_smoothing,
        )
    else:
        sharding = sharding or blocks.plain(logits.shape[_class_dim(logits)] * classes.size)
        total = _each_row(logits, target, classes, sharding, size, weight, ignore_index, label_smoothing)
        total = total if reduction == "none" else total.sum()
    if reduction == "mean":
        total = mean_of(total, target, samples, weight, ignore_index, count, reduced)
    return narrowed(total, logits)


def nll_loss(
    logp: Tensor,
    target: Tensor,
    *,
    samples: Group | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Average = "mean",
    count: Count | None = None,
    reduced: bool = False,
) -> Tensor:
    """`F.nll_loss`: over `samples` a share of the mean, or the mean itself if it is to be `reduced`."""
    how: Average = "sum" if reduction == "mean" else reduction
    total = F.nll_loss(_wide(logp, how), target, weight, ignore_index=ignore_index, reduction=how)
    if reduction == "mean":
        total = mean_of(total, target, samples, weight, ignore_index, count, reduced)
    return narrowed(total, logp)


def mean_of(
    total: Tensor,
    target: Tensor,
    samples: Group | None,
    weight: Tensor | None,
    ignore_index: int,
    count: Count | None,
    reduced: bool,
) -> Tensor:
    """The share of the mean that a sum over this rank's samples is, or with `reduced` the mean over all of them."""
    if reduced and count is None and samples is not None and samples.process_group is not None:
        own = count_labels(target, weight=weight, ignore_index=ignore_index)
        mean: Tensor = _WholeMean.apply(total, own, samples)  # type: ignore[no-untyped-call]
        return mean
    count = count_labels(target, samples=samples, weight=weight, ignore_index=ignore_index) if count is None else count
    count = count() if callable(count) else count
    share = total / _number(count, total)
    return all_reduce(share, samples) if reduced and samples is not None else share


class _WholeMean(torch.autograd.Function):
    """Sum over counts, both over all samples. Counts and sums travel together, in double: a count must be exact."""

    @staticmethod
    def forward(ctx: Any, total: Tensor, count: Tensor, samples: Group) -> Tensor:
        summed, counted = all_reduce_no_grad(torch.stack([total.double(), count.double()]), samples)
        ctx.counted, ctx.samples = counted.to(total.dtype), samples
        mean: Tensor = summed / counted
        return mean.to(total.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return replicate(gradient, ctx.samples) / ctx.counted, None, None


def count_labels(
    target: Tensor, *, samples: Group | None = None, weight: Tensor | None = None, ignore_index: int = -100
) -> Tensor:
    """By what the mean over all samples divides: the labels that count, by weight if there is one."""
    with torch.no_grad():
        if target.is_floating_point():  # class probabilities: every row counts, whatever the weights
            counted = torch.tensor(target.numel() // target.shape[_class_dim(target)], device=target.device)
        elif weight is None:
            counted = (target != ignore_index).sum()
        else:
            valid = target != ignore_index
            counted = weight[target.masked_fill(~valid, 0)].masked_fill(~valid, 0.0).sum()
        return counted if samples is None or samples.process_group is None else all_reduce_no_grad(counted, samples)


def begin_count(
    target: Tensor, *, samples: Group, weight: Tensor | None = None, ignore_index: int = -100
) -> Callable[[], Tensor]:
    """`count_labels`, sent now and awaited by the loss."""
    counted = count_labels(target, weight=weight, ignore_index=ignore_index)
    return (lambda: counted) if samples.process_group is None else all_reduce_async(counted, samples)


def _number(count: Tensor | float, like: Tensor) -> Tensor | float:
    return count.to(like.dtype) if isinstance(count, Tensor) else count


def _class_dim(x: Tensor) -> int:
    return 0 if x.ndim == 1 else 1


def _wide(x: Tensor, reduction: Average) -> Tensor:
    """A sum over many samples does not fit into float16."""
    return x.float() if x.dtype is torch.float16 and reduction == "sum" else x


def narrowed(loss: Tensor, like: Tensor) -> Tensor:
    """Losses have the dtype of their input, and under autocast are float32."""
    return loss if torch.is_autocast_enabled(like.device.type) else loss.to(like.dtype)


def _each_row(
    logits: Tensor,
    target: Tensor,
    group: Group,
    sharding: Shard,
    size: int | None,
    weight: Tensor | None,
    ignore_index: int,
    smoothing: float,
) -> Tensor:
    """The loss of every row from this rank's classes, in float32 or wider."""
    if target.is_floating_point():
        raise InputError(
            f"targets of shape {tuple(target.shape)} are class probabilities, and the classes are split over "
            f"{' '.join(group.axes)}; gather the logits first, or pass integer targets"
        )
    check_classes(logits.shape[_class_dim(logits)], group, sharding, size, weight)
    rest = (target, group, sharding, weight, ignore_index, smoothing)
    each: Tensor = _SplitClasses.apply(logits, *rest)  # type: ignore[no-untyped-call]
    return each


def check_classes(mine: int, group: Group, sharding: Shard, size: int | None, weight: Tensor | None) -> None:
    """Refuse a rank whose classes, or the weights of all classes, are not as many as the sharding says."""
    if (size is not None and size != sharding.elements) or mine != sharding.local(group.size, group.index):
        raise LayoutError(
            f"rank {group.index} of {' '.join(group.axes)} holds {mine} of {size or sharding.elements} classes, and "
            f"its shard of {sharding.elements} has {sharding.local(group.size, group.index)}; pass the sharding of "
            "uneven classes"
        )
    if weight is not None and weight.shape != (sharding.elements,):
        raise LayoutError(
            f"weights of shape {tuple(weight.shape)} for {sharding.elements} classes; pass the whole vector"
        )


class _SplitClasses(torch.autograd.Function):
    """The loss of every row with this rank's classes of the logits; see the top of the file."""

    @staticmethod
    def forward(
        ctx: Any,
        logits: Tensor,
        target: Tensor,
        group: Group,
        sharding: Shard,
        weight: Tensor | None,
        ignore_index: int,
        smoothing: float,
    ) -> Tensor:
        x = _rows_first(logits)
        valid = target != ignore_index
        known = target.masked_fill(~valid, 0)
        torch._assert_async(
            ((known >= 0) & (known < sharding.elements)).all(), f"a target is not in {sharding.elements} classes"
        )
        place, own = blocks.locate(known, sharding, group.size, group.index)
        top = x.amax(-1) if x.shape[-1] else x.new_full(x.shape[:-1], -torch.inf)
        top = all_reduce_no_grad(top, group, "max")
        z = x - top.unsqueeze(-1)
        picked = z.gather(-1, place.unsqueeze(-1)).squeeze(-1) if x.shape[-1] else torch.zeros_like(top)
        sums = [torch.where(own, picked, 0.0)]
        if smoothing:
            sums.append((z if weight is None else z * own_weights(weight, sharding, group).to(z)).sum(-1))
        sums.append(z.exp_().sum(-1))
        *reduced, total = all_reduce_no_grad(torch.stack(sums), group).unbind()
        lse = total.log()
        scale = torch.ones_like(lse) if weight is None else weight.to(lse)[known]
        loss = scale * (lse - reduced[0])
        everything = float(sharding.elements) if weight is None else weight.to(lse).sum()
        if smoothing:
            loss = (1 - smoothing) * loss + smoothing / sharding.elements * (everything * lse - reduced[1])
        ctx.save_for_backward(logits, top + lse, place, own, valid, scale, weight)
        ctx.smoothing, ctx.everything, ctx.group, ctx.sharding = smoothing, everything, group, sharding
        return loss.masked_fill(~valid, 0.0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return _gradient_of_classes(ctx, gradient), *(None,) * 6
        logits, log_total, place, own, valid, scale, weight = ctx.saved_tensors
        smoothing, classes = ctx.smoothing, ctx.sharding.elements
        g = gradient.to(log_total.dtype).masked_fill(~valid, 0.0)
        on_target = (1 - smoothing) * scale * g
        on_all = on_target + smoothing / classes * ctx.everything * g if smoothing else on_target
        dx = (_rows_first(logits) - log_total.unsqueeze(-1)).exp_().mul_(on_all.unsqueeze(-1))
        if smoothing:
            each = (smoothing / classes * g).unsqueeze(-1)
            dx -= each if weight is None else each * own_weights(weight, ctx.sharding, ctx.group).to(each)
        if dx.shape[-1]:
            dx.scatter_add_(-1, place.unsqueeze(-1), torch.where(own, -on_target, 0.0).unsqueeze(-1))
        dx.masked_fill_(~valid.unsqueeze(-1), 0.0)
        return dx.movedim(-1, _class_dim(logits)).to(logits.dtype), *(None,) * 6


def _gradient_of_classes(ctx: Any, gradient: Tensor) -> Tensor:
    """The gradient of `_SplitClasses` made of ops that have one, for `create_graph`: the softmax is taken again.

    The sum of exponentials is over all ranks' classes and read by each for its own, and so is the incoming gradient:
    whatever comes back to either is summed.
    """
    logits, log_total, place, own, valid, scale, weight = ctx.saved_tensors
    smoothing, classes = ctx.smoothing, ctx.sharding.elements
    x = _rows_first(logits)
    shifted = x - log_total.unsqueeze(-1)  # a constant that keeps exponentials small
    log_sum = all_reduce(shifted.exp().sum(-1), ctx.group, dst=R).log()
    g = replicate(gradient.to(log_total.dtype), ctx.group).masked_fill(~valid, 0.0)
    on_target = (1 - smoothing) * scale * g
    on_all = on_target + smoothing / classes * ctx.everything * g if smoothing else on_target
    dx = (shifted - log_sum.unsqueeze(-1)).exp() * on_all.unsqueeze(-1)
    if smoothing:
        each = (smoothing / classes * g).unsqueeze(-1)
        dx = dx - (each if weight is None else each * own_weights(weight, ctx.sharding, ctx.group).to(each))
    if dx.shape[-1]:
        dx = dx.scatter_add(-1, place.unsqueeze(-1), torch.where(own, -on_target, 0.0).unsqueeze(-1))
    dx = dx.masked_fill(~valid.unsqueeze(-1), 0.0)
    result: Tensor = dx.movedim(-1, _class_dim(logits)).to(logits.dtype)
    return result


def _rows_first(logits: Tensor) -> Tensor:
    """Classes last, wide enough to sum exponentials."""
    x = logits.movedim(_class_dim(logits), -1)
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def own_weights(weight: Tensor, sharding: Shard, group: Group) -> Tensor:
    return blocks.shard(weight, 0, sharding, group.size, group.index)

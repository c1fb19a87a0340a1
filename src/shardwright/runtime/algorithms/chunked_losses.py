"""A linear and the cross entropy of its logits, some rows at a time: the logits never exist at full size.

    forward    for each chunk of rows: logits = x w' + b, then of each row
                   m = max_c z_c,  s = sum_c exp(z_c - m),  z_target
               all that stays is one number per row, log s + m; with classes split, m and the sums of all
               chunks are reduced over the group at once
    backward   for each chunk: the logits again, dz_c = exp(z_c - log s - m) g - [c is target] g, and from it
                   dx = dz w,  dw += dz' x,  db += sum of dz

The gradient that comes back is not known in forward (accumulation, a loss scale, a term on the logsumexp), so
nothing of backward is done there. Sums over classes and over chunks are in float32 or wider.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.errors import InputError
from shardwright.layout import Shard

from ..collectives import blocks
from ..collectives.comm import R, all_reduce, all_reduce_no_grad, replicate
from ..world import Group
from .losses import Average, Count, check_classes, mean_of, narrowed, own_weights

Steps = tuple[tuple[Any, ...], ...]
"""What is done to logits before the loss: ("to", "float32"), ("mul", 2.0), ("div", 30.0), ("tanh",)."""

STEPS: dict[str, Callable[..., Tensor]] = {
    "to": lambda z, dtype: z.to(getattr(torch, dtype)),
    "mul": torch.mul,
    "div": torch.div,
    "tanh": torch.tanh,
}


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    chunks: int,
    bias: Tensor | None = None,
    slices: Sequence[tuple[int, int, int, int]] = (),
    steps: Steps = (),
    logsumexp: str | None = None,
    samples: Group | None = None,
    classes: Group | None = None,
    sharding: Shard | None = None,
    size: int | None = None,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: Average = "mean",
    label_smoothing: float = 0.0,
    count: Count | None = None,
    reduced: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """`runtime.cross_entropy` of `F.linear(x, weight, bias)`, whose rows are made in so many chunks.

    slices       (dim, start, end, step) of x: the rows that the loss is of
    steps        what is done to the logits before the loss
    logsumexp    return it too: "rows" in the shape of x's rows, "flat" as one dim; a term on it is a z-loss
    """
    for dim, start, end, step in slices:
        x = x[(slice(None),) * dim + (slice(start, end, step),)]
    lead = x.shape[:-1]
    if target.is_floating_point() or target.numel() != lead.numel():
        raise InputError(
            f"targets of shape {tuple(target.shape)} are not one class for each of the rows {tuple(lead)} of the logits"
        )
    split = classes is not None and classes.process_group is not None
    group = classes if split else None
    if split and sharding is None:
        sharding = blocks.plain(weight.shape[0] * classes.size)  # type: ignore[union-attr]
    sharding = sharding if split else None
    if group is not None and sharding is not None:
        check_classes(weight.shape[0], group, sharding, size, class_weight)
    head = _Head(chunks, steps, group, sharding, class_weight, ignore_index, label_smoothing)
    flat = x.reshape(-1, x.shape[-1])
    each, lse = _ChunkedLoss.apply(flat, weight, bias, target.reshape(-1), head)  # type: ignore[no-untyped-call]
    like = head.stepped(x.new_empty(0))
    total = each.view(target.shape) if reduction == "none" else each.sum()
    if reduction == "mean":
        total = mean_of(total, target, samples, class_weight, ignore_index, count, reduced)
    loss = narrowed(total, like)
    if logsumexp is None:
        return loss
    return loss, narrowed(lse if logsumexp == "flat" else lse.view(lead), like)


@dataclass(frozen=True, slots=True)
class _Head:
    """How the loss of a row follows from its logits. `group` and `sharding` are None unless classes are split."""

    chunks: int
    steps: Steps
    group: Group | None
    sharding: Shard | None
    weight: Tensor | None
    ignore_index: int
    smoothing: float

    def stepped(self, z: Tensor) -> Tensor:
        for name, *arguments in self.steps:
            z = STEPS[name](z, *arguments)
        return z

    def spans(self, rows: int) -> Iterator[slice]:
        """The rows of each chunk, the last of which may have fewer."""
        length = max(1, -(-rows // self.chunks))
        for start in range(0, rows, length):
            yield slice(start, min(start + length, rows))

    def labels(self, target: Tensor, here: int) -> _Labels:
        """Where targets are among the classes that are here."""
        total = self.sharding.elements if self.sharding is not None else here
        valid = target != self.ignore_index
        known = target.masked_fill(~valid, 0)
        torch._assert_async(((known >= 0) & (known < total)).all(), f"a target is not in {total} classes")
        if self.group is None or self.sharding is None:
            return _Labels(total, valid, known, known, None)
        place, own = blocks.locate(known, self.sharding, self.group.size, self.group.index)
        return _Labels(total, valid, known, place, own)

    def scale(self, labels: _Labels, like: Tensor) -> Tensor | None:
        """The weight of each row's class; None where there are no weights."""
        return None if self.weight is None else self.weight.to(like)[labels.known]

    def weights_here(self, like: Tensor) -> Tensor | None:
        """The weights of the classes that are here."""
        if self.weight is None or self.group is None or self.sharding is None:
            return None if self.weight is None else self.weight.to(like)
        return own_weights(self.weight, self.sharding, self.group).to(like)

    def everything(self, labels: _Labels, like: Tensor) -> Tensor | float:
        """The sum of the weights of all classes."""
        return float(labels.classes) if self.weight is None else self.weight.to(like).sum()


@dataclass(frozen=True, slots=True)
class _Labels:
    """classes: of all ranks; valid: targets that count; place: in the classes here; own: whether it is here."""

    classes: int
    valid: Tensor
    known: Tensor
    place: Tensor
    own: Tensor | None


def _wide(z: Tensor) -> Tensor:
    return z.float() if z.dtype in (torch.float16, torch.bfloat16) else z


class _ChunkedLoss(torch.autograd.Function):
    """The loss and the logsumexp of every row; see the top of the file."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, head: _Head
    ) -> tuple[Tensor, Tensor]:
        labels = head.labels(target, weight.shape[0])
        top, picked, spread, total = _statistics(x, weight, bias, labels, head)
        lse = total.log()
        loss = lse - picked
        scale, smoothing = head.scale(labels, lse), head.smoothing
        loss = loss if scale is None else loss * scale
        if smoothing:
            on_all = head.everything(labels, lse) * lse - spread
            loss = (1 - smoothing) * loss + smoothing / labels.classes * on_all
        log_total = top + lse
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias, target, log_total)
        ctx.head = head
        return loss.masked_fill(~labels.valid, 0.0), log_total

    @staticmethod
    def backward(ctx: Any, of_loss: Tensor | None, of_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            raise InputError(
                "a gradient of a gradient does not go through a chunked loss; leave chunked_loss out of the plan"
            )
        x, weight, bias, target, log_total = ctx.saved_tensors
        gradients = _Gradients(ctx.needs_input_grad[:3], x, weight, bias)
        rows = _row_gradients(ctx.head, ctx.head.labels(target, weight.shape[0]), log_total, of_loss, of_lse)
        for span in ctx.head.spans(len(x)):
            gradients.add(span, _logits_gradient(ctx.head, x[span], weight, bias, rows, span))
        return *gradients.done(), None, None


def _statistics(
    x: Tensor, weight: Tensor, bias: Tensor | None, labels: _Labels, head: _Head
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of each row, over all classes: the largest logit, and relative to it the target's, the sum of all (for label
    smoothing, by weight) and the sum of exponentials."""
    here = weight.shape[0]
    like = _wide(head.stepped(x.new_empty(0)))
    top, picked, spread, total = (like.new_zeros(len(x)) for _ in range(4))
    weights = head.weights_here(like)
    if not here:
        top.fill_(-torch.inf)
    for span in head.spans(len(x)) if here else ():
        z = _wide(head.stepped(F.linear(x[span], weight, bias)))
        top[span] = most = z.amax(-1)
        z = z.sub_(most.masked_fill(most.isneginf(), 0.0).unsqueeze(-1))
        picked[span] = z.gather(-1, labels.place[span].unsqueeze(-1)).squeeze(-1)
        if head.smoothing:
            spread[span] = z.sum(-1) if weights is None else z @ weights
        total[span] = z.exp_().sum(-1)
        del z  # before the next chunk is made
    if head.group is None:
        return top, picked, spread, total
    overall = all_reduce_no_grad(top.clone(), head.group, "max")
    shift = torch.where(top.isneginf(), top, top - overall)
    sums = [torch.where(labels.own, picked + shift, 0.0), total * shift.exp()]  # type: ignore[arg-type]
    if head.smoothing:
        sums.append(spread + shift * (here if weights is None else weights.sum()) if here else spread)
    picked, total, *rest = all_reduce_no_grad(torch.stack(sums), head.group).unbind()
    return overall, picked, rest[0] if rest else spread, total


@dataclass(frozen=True, slots=True)
class _RowGradients:
    """Of each row: what its softmax, its target and (with label smoothing) every class is multiplied with."""

    labels: _Labels
    log_total: Tensor
    on_softmax: Tensor
    on_target: Tensor
    on_each: Tensor | None
    masked: bool  # whether rows that don't count have no gradient at all


def _row_gradients(
    head: _Head, labels: _Labels, log_total: Tensor, of_loss: Tensor | None, of_lse: Tensor | None
) -> _RowGradients:
    g = torch.zeros_like(log_total) if of_loss is None else of_loss.to(log_total.dtype)
    g = g.masked_fill(~labels.valid, 0.0)
    scale, smoothing = head.scale(labels, log_total), head.smoothing
    on_target = (1 - smoothing) * (g if scale is None else g * scale)
    on_softmax = on_target
    if smoothing:
        on_softmax = on_softmax + smoothing / labels.classes * head.everything(labels, log_total) * g
    if of_lse is not None:
        on_softmax = on_softmax + of_lse.to(log_total.dtype)
    if labels.own is not None:
        on_target = torch.where(labels.own, on_target, 0.0)
    on_each = smoothing / labels.classes * g if smoothing else None
    return _RowGradients(labels, log_total, on_softmax, on_target, on_each, masked=of_lse is None)


def _logits_gradient(
    head: _Head, x: Tensor, weight: Tensor, bias: Tensor | None, rows: _RowGradients, span: slice
) -> Tensor:
    """The gradient of a chunk of logits, as the linear made them."""
    raw = F.linear(x, weight, bias)
    if all(name == "to" for name, *_ in head.steps):
        return _softmax_gradient(head, _wide(head.stepped(raw)), rows, span).to(raw.dtype)
    raw.requires_grad_()
    with torch.enable_grad():
        z = head.stepped(raw)
    wide = _softmax_gradient(head, _wide(z.detach()).clone(), rows, span)
    (gradient,) = torch.autograd.grad(z, raw, wide.to(z.dtype))
    return gradient


def _softmax_gradient(head: _Head, z: Tensor, rows: _RowGradients, span: slice) -> Tensor:
    """The gradient of the logits that the loss reads, in place of them."""
    if not z.shape[-1]:
        return z
    dz = z.sub_(rows.log_total[span].unsqueeze(-1)).exp_().mul_(rows.on_softmax[span].unsqueeze(-1))
    if rows.on_each is not None:
        each, weights = rows.on_each[span].unsqueeze(-1), head.weights_here(z)
        dz.sub_(each) if weights is None else dz.addcmul_(each, weights, value=-1)
    dz.scatter_add_(-1, rows.labels.place[span].unsqueeze(-1), rows.on_target[span].neg().unsqueeze(-1))
    return dz.masked_fill_(~rows.labels.valid[span].unsqueeze(-1), 0.0) if rows.masked else dz


class _Gradients:
    """The gradients of x, the weight and the bias, chunk by chunk. Narrow ones are summed in float32."""

    def __init__(self, wanted: Sequence[bool], x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        self.x, self.weight, self.bias = x, weight, bias
        self.of_x = torch.empty_like(x) if wanted[0] else None
        summed = _wide(weight[:0]).dtype
        self.of_weight = weight.new_zeros(weight.shape, dtype=summed) if wanted[1] else None
        self.of_bias = weight.new_zeros(weight.shape[:1], dtype=summed) if wanted[2] else None

    def add(self, span: slice, dz: Tensor) -> None:
        if self.of_x is not None:
            torch.mm(dz, self.weight, out=self.of_x[span])
        if self.of_weight is not None and self.of_weight.dtype == dz.dtype:
            self.of_weight.addmm_(dz.t(), self.x[span])
        elif self.of_weight is not None:
            self.of_weight.add_(dz.t() @ self.x[span])
        if self.of_bias is not None:
            self.of_bias.add_(dz.sum(0, dtype=self.of_bias.dtype))

    def done(self) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        return (
            self.of_x,
            None if self.of_weight is None else self.of_weight.to(self.weight.dtype),
            None if self.of_bias is None or self.bias is None else self.of_bias.to(self.bias.dtype),
        )


def logsumexp(x: Tensor, dim: int, classes: Group, *, keepdim: bool = False) -> Tensor:
    """`torch.logsumexp` over a dim that is split over a group: the result is that of all shards."""
    dim = dim % x.ndim
    if classes.process_group is None:
        return torch.logsumexp(x, dim, keepdim=keepdim)
    total: Tensor = _SplitLogsumexp.apply(x, dim, classes)  # type: ignore[no-untyped-call]
    return total.unsqueeze(dim) if keepdim else total


class _SplitLogsumexp(torch.autograd.Function):
    """The result is invariant and so is its gradient; each rank makes the gradient of its own shard."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        wide = _wide(x)
        most = wide.amax(dim) if x.shape[dim] else wide.new_full((*x.shape[:dim], *x.shape[dim + 1 :]), -torch.inf)
        top = all_reduce_no_grad(most, group, "max")
        top = top.masked_fill(top.isneginf(), 0.0)
        total = all_reduce_no_grad((wide - top.unsqueeze(dim)).exp_().sum(dim), group).log_() + top
        ctx.save_for_backward(x, total)
        ctx.dim, ctx.group = dim, group
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        x, total = ctx.saved_tensors
        shifted = _wide(x) - total.detach().unsqueeze(ctx.dim)
        if torch.is_grad_enabled():  # create_graph: each rank reads the sum over all shards for its own
            summed = all_reduce(shifted.exp().sum(ctx.dim), ctx.group, dst=R)
            of_each = replicate(gradient.to(shifted.dtype), ctx.group) / summed
            return (shifted.exp() * of_each.unsqueeze(ctx.dim)).to(x.dtype), None, None
        softmax = shifted.exp_()
        return softmax.mul_(gradient.to(softmax.dtype).unsqueeze(ctx.dim)).to(x.dtype), None, None

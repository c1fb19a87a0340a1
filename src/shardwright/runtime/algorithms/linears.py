"""Linears of one value, whose gradient is all-reduced while the weights' gradients are computed.

    forward    x -> y_i = x w_i' + b_i                  x replicated, or gathered first
    backward   dx = sum_i dy_i w_i                      its sum over the group starts
               dw_i = dy_i' x,  db_i = sum of dy_i      ... and overlaps with these matmuls
               wait for dx

A reshard followed by `F.linear` computes the same. But autograd's own linear computes both gradients
before the reshard sees the first, and no compute is left to overlap with the communication.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from shardwright.layout import Shard

from ..collectives import comm
from ..faults import flight_recorder
from ..world import Group


@dataclass(frozen=True, slots=True)
class InputReshard:
    """How the input gets to the linears, and how its gradient goes back."""

    gather: Callable[[Tensor], Tensor] | None  # None if it is replicated
    begin: Callable[[Tensor], Callable[[], Tensor]]  # sums the gradient while something else runs; no autograd
    back: Callable[[Tensor], Tensor]  # the same at once, with a gradient
    replicate: Callable[[Tensor], Tensor] = lambda x: x  # so that gradients that come to x are summed


def replicate_linear(x: Tensor, group: Group, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`replicate`, then `F.linear`."""
    return replicate_linears(x, group, [weight], [bias])[0]


def replicate_linears(
    x: Tensor, group: Group, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None = None
) -> tuple[Tensor, ...]:
    """`replicate`, then `F.linear` with each of the weights."""
    if group.process_group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return _each(x, weights, biases)
    reshard = InputReshard(
        gather=None,
        begin=lambda gradient: comm.all_reduce_async(gradient, group),
        back=lambda gradient: comm.all_reduce(gradient, group),
        replicate=lambda x: comm.replicate(x, group),
    )
    return _apply(x, reshard, weights, biases)


def all_gather_linear(
    x: Tensor, dim: int, group: Group, weight: Tensor, bias: Tensor | None = None, sharding: Shard | None = None
) -> Tensor:
    """`all_gather(dst=R)`, then `F.linear`."""
    return all_gather_linears(x, dim, group, [weight], [bias], sharding)[0]


def all_gather_linears(
    x: Tensor,
    dim: int,
    group: Group,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None = None,
    sharding: Shard | None = None,
) -> tuple[Tensor, ...]:
    """`all_gather(dst=R)`, then `F.linear` with each of the weights."""
    if group.process_group is None or not (torch.is_grad_enabled() and x.requires_grad):
        return _each(comm.all_gather(x, dim, group, sharding, dst=comm.R), weights, biases)

    reshard = InputReshard(
        gather=lambda x: comm.all_gather(x, dim, group, sharding, dst=comm.R),
        begin=lambda gradient: comm.reduce_scatter_async(gradient, dim, group, sharding),
        back=lambda gradient: comm.reduce_scatter(gradient, dim, group, sharding),
    )
    return _apply(x, reshard, weights, biases)


def _each(x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None) -> tuple[Tensor, ...]:
    return tuple(F.linear(x, w, b) for w, b in zip(weights, biases or [None] * len(weights), strict=True))


def _apply(
    x: Tensor, reshard: InputReshard, weights: Sequence[Tensor], biases: Sequence[Tensor | None] | None
) -> tuple[Tensor, ...]:
    biases = biases or [None] * len(weights)
    outputs: tuple[Tensor, ...] = _Linears.apply(x, reshard, *weights, *biases)  # type: ignore[no-untyped-call]
    return outputs[: len(weights)]


class _Linears(torch.autograd.Function):
    """Where x is gathered first, it is an output too, so that second-order gradients can flow back to it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, reshard: InputReshard, *layers: Tensor | None) -> tuple[Tensor, ...]:
        count = len(layers) // 2
        weights = [w for w in layers[:count] if w is not None]
        replicated, ctx.place = x if reshard.gather is None else reshard.gather(x), flight_recorder.here()
        ctx.reshard, ctx.biases = reshard, [None if b is None else b.dtype for b in layers[count:]]
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(replicated, *weights)
        return *_each(replicated, weights, layers[count:]), *(() if reshard.gather is None else (replicated,))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        x, *weights = ctx.saved_tensors
        flat_gradients = [None if g is None else g.reshape(-1, g.shape[-1]) for g in gradients[: len(weights)]]
        more = None if ctx.reshard.gather is None else gradients[-1]  # comes by a gradient's gradient only
        before = flight_recorder.within(ctx.place)
        if torch.is_grad_enabled():  # create_graph
            summed = ctx.reshard.back(_sum_of_products(x, flat_gradients, weights, more))
            x = ctx.reshard.replicate(x)
        else:
            of_input = _of_input(x, flat_gradients, weights)
            finish = ctx.reshard.begin(of_input if more is None else of_input.add_(more))
        flight_recorder.within(before)
        flat = x.reshape(-1, x.shape[-1])
        of_weights = [
            (g.t() @ flat.to(g.dtype)).to(w.dtype) if g is not None and wants else None
            for g, w, wants in zip(flat_gradients, weights, ctx.needs_input_grad[2:], strict=False)
        ]
        of_biases = [
            g.sum(0).to(dtype) if g is not None and wants else None
            for g, dtype, wants in zip(
                flat_gradients, ctx.biases, ctx.needs_input_grad[2 + len(flat_gradients) :], strict=True
            )
        ]
        return summed if torch.is_grad_enabled() else finish(), None, *of_weights, *of_biases


def _sum_of_products(
    x: Tensor, flat_gradients: Sequence[Tensor | None], weights: Sequence[Tensor], more: Tensor | None
) -> Tensor:
    """`_of_input` made of ops that have a gradient."""
    parts = [
        (g @ w.to(g.dtype)).to(x.dtype).view(x.shape)
        for g, w in zip(flat_gradients, weights, strict=True)
        if g is not None
    ]
    parts += [] if more is None else [more]
    return functools.reduce(torch.add, parts) if parts else torch.zeros_like(x)


def _of_input(x: Tensor, flat_gradients: Sequence[Tensor | None], weights: Sequence[Tensor]) -> Tensor:
    """The sum over the linears, in the dtype of x: under autocast the matmuls are narrower."""
    total: Tensor | None = None
    for g, w in zip(flat_gradients, weights, strict=True):
        if g is None:  # this output is unused
            continue
        if total is not None and total.dtype == g.dtype:
            total.addmm_(g, w.to(g.dtype))
        else:
            part = (g @ w.to(g.dtype)).to(x.dtype)
            total = part if total is None else total.add_(part)
    return torch.zeros_like(x) if total is None else total.view(x.shape)

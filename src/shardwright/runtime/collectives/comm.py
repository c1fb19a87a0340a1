"""Reshards: every change of layout along one group, named by its collective, with its backward.

Each function says what it does forward and backward, with the layout states of the value on the
group's axis (`shardwright.layout`): P partial, I invariant, R replicate, S shard. Backward is the exact
adjoint in these states, which is why torch's own differentiable collectives are not used: they sum
again in backward.

    from \\ to   I             R                     S                 P
    P           all_reduce    all_reduce(dst=R)     reduce_scatter
    I                         replicate             shard             partial
    R           invariant                           shard(src=R)
    S           all_gather    all_gather(dst=R)     all_to_all        zero_pad

`sharding` says which elements of a dim each rank holds; None is the even contiguous split. Uneven shards
travel padded to the largest. Inputs and incoming gradients are never written to, as another op may have saved
them; only `all_reduce_` sums in place, where lowering knows that nobody has. `recording` lists the
collectives that are issued, forward and backward.

Over a `Moment` (a microbatch), only reshards that need no other rank work: `shard` of a value without gradient,
`shard(src=R)`, `zero_pad`, `partial`, `invariant`. Backward reads the moment again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial as bind
from typing import Any, Literal

import torch
from torch import Tensor

from shardwright.errors import LayoutError
from shardwright.layout import Reduction, Shard

from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import Group, here
from . import blocks, process_group

Issued = tuple[str, tuple[str, ...], tuple[int, ...]]
_listeners: tuple[Callable[[str, Group, tuple[int, ...]], None], ...] = ()


@contextmanager
def recording() -> Iterator[list[Issued]]:
    """Collect (kind, axes, shape of what was sent) for every collective this rank issues meanwhile."""
    global _listeners
    issued: list[Issued] = []
    rank = here().rank

    def listen(kind: str, group: Group, shape: tuple[int, ...]) -> None:
        if group.ranks[group.index] == rank:  # in tests several ranks live in one process
            issued.append((kind, group.axes, shape))

    _listeners = (*_listeners, listen)
    try:
        yield issued
    finally:
        _listeners = tuple(listener for listener in _listeners if listener is not listen)


def note(kind: str, group: Group, shape: tuple[int, ...]) -> None:
    """Tell `recording` that a collective is issued (for code that issues its own)."""
    for listen in _listeners:
        listen(kind, group, shape)


# Collectives on plain values: no autograd, a fresh result.


def all_reduce_no_grad(x: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
    """The reduction of a value over the group, in a new tensor. No autograd."""
    if x.dtype is torch.bool:
        return all_reduce_no_grad(x.to(torch.uint8), group, "max" if op == "sum" else op).bool()
    out = x.detach().clone(memory_format=torch.contiguous_format)
    return out if group.process_group is None else all_reduce_async(out, group, op)()


@report_failure
def all_reduce_async(x: Tensor, group: Group, op: Reduction = "sum") -> Callable[[], Tensor]:
    """Start to reduce a contiguous tensor in place. Calling the result waits for it. No autograd."""
    if not x.numel():
        return lambda: x
    if _listeners:
        note("all_reduce", group, tuple(x.shape))
    flight_recorder.enter("all_reduce", group.process_group, x.shape)
    work = process_group.all_reduce(x, group.process_group, op)

    @report_failure
    def finish() -> Tensor:
        work.wait()
        return x

    return finish


@report_failure
def _all_gather(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    sharding = sharding or blocks.plain(x.shape[dim] * group.size)
    local = blocks.fill(x, dim, sharding, group.size, group.index).contiguous()
    stacked = local.new_empty((group.size, *local.shape))
    if local.numel():
        if _listeners:
            note("all_gather", group, tuple(local.shape))
        flight_recorder.enter("all_gather", group.process_group, local.shape)
        process_group.all_gather(_flat(stacked), _flat(local), group.process_group).wait()
    return blocks.unstack(stacked, dim, sharding)


@report_failure
def reduce_scatter_async(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Callable[[], Tensor]:
    """Start a reduce_scatter. Calling the result waits for this rank's shard. No autograd."""
    dim %= x.ndim
    sharding = sharding or _even(x, dim, group)
    stacked = blocks.stack(x, dim, sharding, group.size)
    local = stacked.new_empty(stacked.shape[1:])
    work: process_group.PendingWork = process_group.DONE
    if local.numel():
        if _listeners:
            note("reduce_scatter", group, tuple(x.shape))
        flight_recorder.enter("reduce_scatter", group.process_group, x.shape)
        work = process_group.reduce_scatter(local.view(-1), stacked.view(-1), group.process_group)

    @report_failure
    def finish() -> Tensor:
        work.wait()
        return local.narrow(dim, 0, sharding.local(group.size, group.index))

    return finish


def _reduce_scatter(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    if x.dtype is torch.bool:
        return _reduce_scatter(x.to(torch.int32), dim, group, sharding).bool()
    return reduce_scatter_async(x, dim, group, sharding)()


def _shard(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    return blocks.shard(x, dim, sharding or _even(x, dim, group), group.size, group.index)


def _zero_pad(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    sharding = sharding or blocks.plain(x.shape[dim] * group.size)
    return blocks.zero_pad(x, dim, sharding, group.size, group.index)


@report_failure
def _all_to_all(
    x: Tensor, gather_dim: int, shard_dim: int, group: Group, shardings: tuple[Shard | None, Shard | None]
) -> Tensor:
    gather_dim, shard_dim = gather_dim % x.ndim, shard_dim % x.ndim
    if gather_dim == shard_dim:
        return _shard(_all_gather(x, gather_dim, group, shardings[0]), shard_dim, group, shardings[1])
    gather_sharding = shardings[0] or blocks.plain(x.shape[gather_dim] * group.size)
    shard_sharding = shardings[1] or _even(x, shard_dim, group)
    local = blocks.fill(x, gather_dim, gather_sharding, group.size, group.index)
    sent = blocks.stack(local, shard_dim, shard_sharding, group.size)
    got = torch.empty_like(sent)
    if sent.numel():
        if _listeners:
            note("all_to_all", group, tuple(x.shape))
        flight_recorder.enter("all_to_all", group.process_group, x.shape)
        process_group.all_to_all(_flat(got), _flat(sent), group.process_group).wait()
    mine = got.narrow(shard_dim + 1, 0, shard_sharding.local(group.size, group.index))
    return blocks.unstack(mine, gather_dim, gather_sharding)


def _zero_but_on_first(x: Tensor, group: Group) -> Tensor:
    return x if group.index == 0 else torch.zeros_like(x)


def _nothing(x: Tensor) -> Tensor:
    return x


def _even(x: Tensor, dim: int, group: Group) -> Shard:
    if x.shape[dim] % group.size:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by the {group.size} ranks of "
            f"{' '.join(group.axes)}; pass a sharding that says which elements each rank has"
        )
    return blocks.plain(x.shape[dim])


def _flat(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.dtype is torch.bool else x).view(-1)


# Reshards.


def _unviewed(result: Tensor, x: Tensor) -> Tensor:
    """The same memory as a tensor of its own, unless it is that of `x`.

    What comes out of a collective is often a view of a buffer. Autograd lets nobody write in place to a view that a
    custom function returns, and an output of the model belongs to the user.
    """
    if not result._is_view() or result.untyped_storage().data_ptr() == x.untyped_storage().data_ptr():
        return result
    own = result.new_empty(0)
    return own.set_(result.untyped_storage(), result.storage_offset(), result.size(), result.stride())


class _Reshard(torch.autograd.Function):
    """A linear map and its adjoint, each a plain function; the gradient's gradient swaps them again."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, linear_map: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]
    ) -> Tensor:
        ctx.linear_map, ctx.adjoint, ctx.place = linear_map, adjoint, flight_recorder.here()
        return _unviewed(linear_map(x), x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        before = flight_recorder.within(ctx.place)
        try:
            return reshard(gradient, ctx.adjoint, ctx.linear_map), None, None
        finally:
            flight_recorder.within(before)


def reshard(x: Tensor, linear_map: Callable[[Tensor], Tensor], adjoint: Callable[[Tensor], Tensor]) -> Tensor:
    """A value changed by one linear map, and its gradient by the adjoint of it."""
    x = x.resolve_conj() if x.is_complex() else x  # a conjugate is a view that can't be sent as it is
    if x.requires_grad and torch.is_grad_enabled():
        resharded: Tensor = _Reshard.apply(x, linear_map, adjoint)  # type: ignore[no-untyped-call]
        return resharded
    return linear_map(x)


class _SumInPlace(torch.autograd.Function):
    """Sums in place. Autograd raises if another op has saved the value for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        ctx.group = group
        return all_reduce_async(x, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return replicate(gradient, ctx.group), None  # identity, whose own backward is an all_reduce


Factor = float | Callable[[], Tensor]
"""A number, or a function that returns it once backward needs it."""


class _Scale(torch.autograd.Function):
    """The border between a replica's loss and the mean over all replicas; not an adjoint pair.

    Values pass unchanged, gradients are scaled. A gradient that the user computes with (`create_graph`) is a value
    to them: its own gradient passes unchanged, and the next one is scaled again.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: Factor) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        weighed: Tensor = _Weigh.apply(gradient, ctx.factor)  # type: ignore[no-untyped-call]
        return weighed, None


class _Weigh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gradient: Tensor, factor: Factor) -> Tensor:
        ctx.factor = factor
        return gradient * (factor().to(gradient.dtype) if callable(factor) else factor)

    @staticmethod
    def backward(ctx: Any, second_order: Tensor) -> tuple[Tensor, None]:
        return scale_gradient(second_order, ctx.factor), None


I: Literal["I"] = "I"  # noqa: E741
R: Literal["R"] = "R"
"""The two states of a replicated value (`shardwright.layout`), for `dst` and `src`."""

State = Literal["I", "R"]
Along = Callable[[Tensor, int, Group, Shard | None], Tensor]


def _along(function: Along, dim: int, group: Group, sharding: Shard | None) -> Callable[[Tensor], Tensor]:
    return lambda x: function(x, dim, group, sharding)


def all_reduce(x: Tensor, group: Group, dst: State = I, op: Reduction = "sum") -> Tensor:
    """P to `dst`. Forward: all_reduce / backward: nothing to I, all_reduce to R. Of `op` only a sum has a gradient."""
    if group.process_group is None:
        return x
    if op != "sum":
        return all_reduce_no_grad(x, group, op)
    reduce = bind(all_reduce_no_grad, group=group)
    return reshard(x, reduce, _nothing if dst == I else reduce)


def all_reduce_(x: Tensor, group: Group) -> Tensor:
    """`all_reduce` in place, for a value that nobody else reads."""
    if group.process_group is None or x.dtype is torch.bool or not x.is_contiguous():
        return all_reduce(x, group)
    if x.requires_grad and torch.is_grad_enabled():
        summed: Tensor = _SumInPlace.apply(x, group)  # type: ignore[no-untyped-call]
        return summed
    return all_reduce_async(x, group)()


def replicate(x: Tensor, group: Group) -> Tensor:
    """I to R. Forward: nothing / backward: all_reduce."""
    if group.process_group is None or not x.requires_grad:
        return x
    return reshard(x, _nothing, bind(all_reduce_no_grad, group=group))


def all_gather(x: Tensor, dim: int, group: Group, sharding: Shard | None = None, dst: State = I) -> Tensor:
    """S to `dst`. Forward: all_gather / backward: this rank's slice to I, reduce_scatter to R."""
    if group.process_group is None:
        return x
    along = bind(_along, dim=dim, group=group, sharding=sharding)
    return reshard(x, along(_all_gather), along(_shard if dst == I else _reduce_scatter))


def shard(x: Tensor, dim: int, group: Group, sharding: Shard | None = None, src: State = I) -> Tensor:
    """`src` to S. Forward: this rank's slice / backward: all_gather from I, zero-padding from R."""
    if group.size == 1:
        return x
    along = bind(_along, dim=dim, group=group, sharding=sharding)
    return reshard(x, along(_shard), along(_all_gather if src == I else _zero_pad))


def reduce_scatter(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """P to S. Forward: reduce_scatter / backward: all_gather."""
    if group.process_group is None:
        return x
    along = bind(_along, dim=dim, group=group, sharding=sharding)
    return reshard(x, along(_reduce_scatter), along(_all_gather))


def zero_pad(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """S to P. Forward: zeros where other ranks have their shards / backward: this rank's slice."""
    if group.size == 1:
        return x
    along = bind(_along, dim=dim, group=group, sharding=sharding)
    return reshard(x, along(_zero_pad), along(_shard))


def all_to_all(
    x: Tensor,
    gather_dim: int,
    shard_dim: int,
    group: Group,
    gather_sharding: Shard | None = None,
    shard_sharding: Shard | None = None,
) -> Tensor:
    """S(gather_dim) to S(shard_dim). Forward: all_to_all / backward: all_to_all."""
    if group.process_group is None:
        return x
    forward = bind(_all_to_all, gather_dim=gather_dim, shard_dim=shard_dim, group=group)
    backward = bind(_all_to_all, gather_dim=shard_dim, shard_dim=gather_dim, group=group)
    return reshard(
        x,
        bind(forward, shardings=(gather_sharding, shard_sharding)),
        bind(backward, shardings=(shard_sharding, gather_sharding)),
    )


def partial(x: Tensor, group: Group) -> Tensor:
    """I to P. Forward: zeros on all but the first rank / backward: nothing."""
    if group.size == 1:
        return x
    return reshard(x, bind(_zero_but_on_first, group=group), _nothing)


def invariant(x: Tensor, group: Group) -> Tensor:
    """R to I. Forward: nothing / backward: zeros on all but the first rank."""
    if group.size == 1 or not x.requires_grad:
        return x
    return reshard(x, _nothing, bind(_zero_but_on_first, group=group))


def scale_gradient(x: Tensor, factor: Factor) -> Tensor:
    """Forward does nothing / backward multiplies by the factor."""
    if not x.requires_grad:
        return x
    scaled: Tensor = _Scale.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled

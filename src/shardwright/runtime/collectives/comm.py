"""The converters: every change of layout along one group, with its backward.

Each function says what it does forward and backward, with the layouts of the value:
P partial sum, W whole, F whole with a partial gradient ("fanned"), S split (see
`shardwright.layout`). Backward is the exact adjoint in these layouts, which is why
torch's own differentiable collectives are not used: they sum again in backward.

    from \\ to   W                 F              S                 P
    P           fan_in            fan_in_out     reduce_scatter
    W                             fan_out        take              on_first
    F           gradient_on_first                take_pad
    S           gather            gather_sum     exchange          pad

A `cut` of None means the contiguous even cut of the dim. Uneven cuts travel padded to
the largest piece. Inputs and incoming gradients are never written to, as another op may
hold them; only `fan_in_` sums in place, where lowering knows that nobody does. `recording`
lists the collectives that are issued, forward and backward.

Over a `Moment`, a place in time, only what needs nobody else works: `take` of a value without
gradient, `take_pad`, `pad`, `on_first`, `gradient_on_first`. Backward reads the moment again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

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
        _listeners = tuple(held for held in _listeners if held is not listen)


def note(kind: str, group: Group, shape: tuple[int, ...]) -> None:
    """Tell `recording` that a collective is issued (for code that issues its own)."""
    for listen in _listeners:
        listen(kind, group, shape)


# Collectives on plain values: no autograd, a fresh result.


def all_reduce(x: Tensor, group: Group, op: Reduction = "sum") -> Tensor:
    """The reduction of a value over the group, in a new tensor. No autograd."""
    if x.dtype is torch.bool:
        return all_reduce(x.to(torch.uint8), group, "max" if op == "sum" else op).bool()
    out = x.detach().clone(memory_format=torch.contiguous_format)
    return out if group.process_group is None else begin_all_reduce(out, group, op)()


@report_failure
def begin_all_reduce(x: Tensor, group: Group, op: Reduction = "sum") -> Callable[[], Tensor]:
    """Begin to reduce a contiguous tensor in place. The result gives it once it is reduced. No autograd."""
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
def _gather(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    sharding = sharding or blocks.plain(x.shape[dim] * group.size)
    piece = blocks.fill(x, dim, sharding, group.size, group.index).contiguous()
    stacked = piece.new_empty((group.size, *piece.shape))
    if piece.numel():
        if _listeners:
            note("all_gather", group, tuple(piece.shape))
        flight_recorder.enter("all_gather", group.process_group, piece.shape)
        process_group.all_gather(_flat(stacked), _flat(piece), group.process_group).wait()
    return blocks.unstack(stacked, dim, sharding)


@report_failure
def begin_reduce_scatter(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Callable[[], Tensor]:
    """Begin to sum a tensor and scatter it. The result gives this rank's piece once it is there. No autograd."""
    dim %= x.ndim
    sharding = sharding or _even(x, dim, group)
    stacked = blocks.stack(x, dim, sharding, group.size)
    piece = stacked.new_empty(stacked.shape[1:])
    work: process_group.PendingWork = process_group.DONE
    if piece.numel():
        if _listeners:
            note("reduce_scatter", group, tuple(x.shape))
        flight_recorder.enter("reduce_scatter", group.process_group, x.shape)
        work = process_group.reduce_scatter(piece.view(-1), stacked.view(-1), group.process_group)

    @report_failure
    def finish() -> Tensor:
        work.wait()
        return piece.narrow(dim, 0, sharding.local(group.size, group.index))

    return finish


def _reduce_scatter(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    if x.dtype is torch.bool:
        return _reduce_scatter(x.to(torch.int32), dim, group, sharding).bool()
    return begin_reduce_scatter(x, dim, group, sharding)()


def _take(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    return blocks.shard(x, dim, sharding or _even(x, dim, group), group.size, group.index)


def _pad(x: Tensor, dim: int, group: Group, sharding: Shard | None) -> Tensor:
    dim %= x.ndim
    sharding = sharding or blocks.plain(x.shape[dim] * group.size)
    return blocks.zero_pad(x, dim, sharding, group.size, group.index)


@report_failure
def _exchange(
    x: Tensor, gather_dim: int, take_dim: int, group: Group, given: tuple[Shard | None, Shard | None]
) -> Tensor:
    gather_dim, take_dim = gather_dim % x.ndim, take_dim % x.ndim
    if gather_dim == take_dim:
        return _take(_gather(x, gather_dim, group, given[0]), take_dim, group, given[1])
    gather_cut = given[0] or blocks.plain(x.shape[gather_dim] * group.size)
    take_cut = given[1] or _even(x, take_dim, group)
    piece = blocks.fill(x, gather_dim, gather_cut, group.size, group.index)
    sent = blocks.stack(piece, take_dim, take_cut, group.size)
    got = torch.empty_like(sent)
    if sent.numel():
        if _listeners:
            note("all_to_all", group, tuple(x.shape))
        flight_recorder.enter("all_to_all", group.process_group, x.shape)
        process_group.all_to_all(_flat(got), _flat(sent), group.process_group).wait()
    mine = got.narrow(take_dim + 1, 0, take_cut.local(group.size, group.index))
    return blocks.unstack(mine, gather_dim, gather_cut)


def _keep_on_first(x: Tensor, group: Group) -> Tensor:
    return x if group.index == 0 else torch.zeros_like(x)


def _nothing(x: Tensor) -> Tensor:
    return x


def _even(x: Tensor, dim: int, group: Group) -> Shard:
    if x.shape[dim] % group.size:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} does not divide by the {group.size} ranks of "
            f"{' '.join(group.axes)}; pass the cut that says who holds what"
        )
    return blocks.plain(x.shape[dim])


def _flat(x: Tensor) -> Tensor:
    return (x.view(torch.uint8) if x.dtype is torch.bool else x).view(-1)


# The converters.


class _Convert(torch.autograd.Function):
    """A linear map and its adjoint, each a plain function; the gradient's gradient swaps them again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.there, ctx.back, ctx.place = there, back, flight_recorder.here()
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        before = flight_recorder.within(ctx.place)
        try:
            return convert(gradient, ctx.back, ctx.there), None, None
        finally:
            flight_recorder.within(before)


def convert(x: Tensor, there: Callable[[Tensor], Tensor], back: Callable[[Tensor], Tensor]) -> Tensor:
    """A value changed by one linear map, and its gradient by the adjoint of it."""
    x = x.resolve_conj() if x.is_complex() else x  # a conjugate is a view that can't be sent as it is
    if x.requires_grad and torch.is_grad_enabled():
        converted: Tensor = _Convert.apply(x, there, back)  # type: ignore[no-untyped-call]
        return converted
    return there(x)


class _SumInPlace(torch.autograd.Function):
    """Sums where the value stands. Autograd refuses it if another op has kept the value for its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        ctx.mark_dirty(x)
        ctx.group = group
        return begin_all_reduce(x, group)()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return fan_out(gradient, ctx.group), None  # nothing, and its own gradient is a sum again


Factor = float | Callable[[], Tensor]
"""A number, or what gives it once backward needs it."""


class _Scale(torch.autograd.Function):
    """The border between the user's loss and that of all groups, a mean of theirs; not an adjoint pair.

    Values cross it as they are, and what is a gradient is weighed. A gradient that the user computes with
    (`create_graph`) is a value to them, so that its own gradient crosses as it is, and the next is weighed again.
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
    def backward(ctx: Any, again: Tensor) -> tuple[Tensor, None]:
        return scale_gradient(again, ctx.factor), None


def fan_in(x: Tensor, group: Group) -> Tensor:
    """P to W. Forward sums over the group / backward does nothing."""
    if group.process_group is None:
        return x
    return convert(x, partial(all_reduce, group=group), _nothing)


def fan_in_(x: Tensor, group: Group) -> Tensor:
    """`fan_in` in place, for a value that nobody else reads."""
    if group.process_group is None or x.dtype is torch.bool or not x.is_contiguous():
        return fan_in(x, group)
    if x.requires_grad and torch.is_grad_enabled():
        summed: Tensor = _SumInPlace.apply(x, group)  # type: ignore[no-untyped-call]
        return summed
    return begin_all_reduce(x, group)()


def fan_out(x: Tensor, group: Group) -> Tensor:
    """W to F. Forward does nothing / backward sums over the group."""
    if group.process_group is None or not x.requires_grad:
        return x
    return convert(x, _nothing, partial(all_reduce, group=group))


def fan_in_out(x: Tensor, group: Group) -> Tensor:
    """P to F. Forward sums over the group / backward sums over the group."""
    if group.process_group is None:
        return x
    both = partial(all_reduce, group=group)
    return convert(x, both, both)


def gather(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """S to W. Forward gathers the pieces / backward takes this rank's piece."""
    if group.process_group is None:
        return x
    return convert(
        x,
        partial(_gather, dim=dim, group=group, sharding=sharding),
        partial(_take, dim=dim, group=group, sharding=sharding),
    )


def gather_sum(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """S to F. Forward gathers the pieces / backward sums them and scatters."""
    if group.process_group is None:
        return x
    return convert(
        x,
        partial(_gather, dim=dim, group=group, sharding=sharding),
        partial(_reduce_scatter, dim=dim, group=group, sharding=sharding),
    )


def take(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """W to S. Forward takes this rank's piece / backward gathers the pieces."""
    if group.size == 1:
        return x
    return convert(
        x,
        partial(_take, dim=dim, group=group, sharding=sharding),
        partial(_gather, dim=dim, group=group, sharding=sharding),
    )


def take_pad(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """F to S. Forward takes this rank's piece / backward pads it with zeros."""
    if group.size == 1:
        return x
    return convert(
        x,
        partial(_take, dim=dim, group=group, sharding=sharding),
        partial(_pad, dim=dim, group=group, sharding=sharding),
    )


def reduce_scatter(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """P to S. Forward sums and scatters / backward gathers the pieces."""
    if group.process_group is None:
        return x
    return convert(
        x,
        partial(_reduce_scatter, dim=dim, group=group, sharding=sharding),
        partial(_gather, dim=dim, group=group, sharding=sharding),
    )


def pad(x: Tensor, dim: int, group: Group, sharding: Shard | None = None) -> Tensor:
    """S to P. Forward pads this rank's piece with zeros / backward takes it."""
    if group.size == 1:
        return x
    return convert(
        x,
        partial(_pad, dim=dim, group=group, sharding=sharding),
        partial(_take, dim=dim, group=group, sharding=sharding),
    )


def exchange(
    x: Tensor,
    gather_dim: int,
    take_dim: int,
    group: Group,
    gather_cut: Shard | None = None,
    take_cut: Shard | None = None,
) -> Tensor:
    """S to S of another dim. Forward sends every rank its piece / backward sends the pieces back."""
    if group.process_group is None:
        return x
    return convert(
        x,
        partial(_exchange, gather_dim=gather_dim, take_dim=take_dim, group=group, given=(gather_cut, take_cut)),
        partial(_exchange, gather_dim=take_dim, take_dim=gather_dim, group=group, given=(take_cut, gather_cut)),
    )


def on_first(x: Tensor, group: Group) -> Tensor:
    """W to P. Forward keeps the value on the first rank, zeros elsewhere / backward does nothing."""
    if group.size == 1:
        return x
    return convert(x, partial(_keep_on_first, group=group), _nothing)


def gradient_on_first(x: Tensor, group: Group) -> Tensor:
    """F to W. Forward does nothing / backward keeps the gradient on the first rank, zeros elsewhere."""
    if group.size == 1 or not x.requires_grad:
        return x
    return convert(x, _nothing, partial(_keep_on_first, group=group))


def reduce(x: Tensor, group: Group, op: Reduction) -> Tensor:
    """Partial(op) to W for a value without gradient. Forward reduces over the group / no backward."""
    if group.process_group is None:
        return x
    return all_reduce(x, group, op)


def scale_gradient(x: Tensor, factor: Factor) -> Tensor:
    """Forward does nothing / backward multiplies by the factor."""
    if not x.requires_grad:
        return x
    scaled: Tensor = _Scale.apply(x, factor)  # type: ignore[no-untyped-call]
    return scaled

"""Scalars whose all_reduce is still under way: awaited when their value is read.

A loss is returned as the mean over the global batch, but backward does not need it, only the
count of labels that it divides by. So the count is reduced as soon as the labels are there
(`losses.begin_count`), and the sum of the loss is awaited when the loss is read (`PendingTensor`).
Ranks then synchronize in backward only, as if each had a loss of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..parameters.sharded import Untouched
from ..world import Group
from .comm import all_reduce_async, replicate

_OF = torch.Tensor
_VALUE_FREE = {
    _OF.backward, _OF.register_hook, _OF.retain_grad, _OF.size, _OF.dim,
    *(getattr(_OF, name).__get__ for name in "shape dtype device ndim requires_grad grad_fn is_leaf grad".split()),
}  # fmt: skip
"""What can be done to a tensor without its value: none of these waits."""


class PendingTensor(Tensor):
    """A tensor whose value is being reduced. Any use that needs the value waits for it."""

    finish: Callable[[], Tensor] | None

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _VALUE_FREE:
            with Untouched():
                args, kwargs = torch.utils._pytree.tree_map_only(PendingTensor, _wait, (args, kwargs))
            if any(kind is not cls for kind in types):  # a parameter in the same call handles its own gradient
                return func(*args, **(kwargs or {}))
        with Untouched():
            return func(*args, **(kwargs or {}))


def _wait(x: PendingTensor) -> Tensor:
    if x.finish is not None:
        x.finish()
        x.finish = None
    return x.as_subclass(Tensor)


class _PendingSum(torch.autograd.Function):
    """The tensor that a share is summed into; its backward is the identity, whose own backward is an all_reduce."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, into: Callable[[], Tensor], group: Group) -> Tensor:
        ctx.group = group
        return into()  # not an input: autograd forbids writing to a returned input

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return replicate(gradient, ctx.group), None, None


def all_reduce_pending(share: Tensor, group: Group) -> Tensor:
    """`comm.all_reduce` of a value that only the user reads: P to I, awaited when it is read."""
    if group.process_group is None:
        return share
    into = share.detach().clone()
    finish = all_reduce_async(into, group)
    result: Tensor = _PendingSum.apply(share, lambda: into, group)  # type: ignore[no-untyped-call]
    pending = result.as_subclass(PendingTensor)
    pending.finish = finish
    return pending

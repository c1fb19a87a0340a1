"""The norm of a shard, which becomes the norm of the whole tensor when somebody looks at it.

A `PendingNorm` is a local number that still has to be added up over the axes that shard the shard. Norms that are
stacked are settled together, with one small collective for each axis. A penalty made of a norm has a gradient:

    N = (sum of l^p)^(1/p)      dN/dl = (l / N)^(p - 1), nothing where l is 0
    N = max of l                dN/dl = 1 shared by the ranks that have it

where l is the norm of a rank's own shard, whose gradient torch knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import Group, Groups
from .pipeline_norms import PipelineNorms
from .stage_numbers import combined, is_of_stage, numbered


class PendingNorm(Tensor):
    """The norm of the local shard; becomes the norm of the whole when it is used."""

    axes: tuple[str, ...]
    groups: Groups
    order: float
    stages: PipelineNorms | None
    of: str  # the name of the parameter
    knows_stages = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.Tensor.to and not kwargs and args[1:] == (args[0].device,):
                return args[0]
            if func is torch.stack and isinstance(args[0], (list, tuple)):
                return torch.stack(_of_all_stages(args[0], _settle(args[0])), *args[1:], **(kwargs or {}))
            leaves = torch.utils._pytree.tree_leaves((args, kwargs))
            of_stage = any(map(is_of_stage, leaves))
            of = combined(func, leaves) if of_stage else None
            plain = torch.utils._pytree.tree_map_only(PendingNorm, global_norm, (args, kwargs or {}))
            result = func(*plain[0], **plain[1])
            return result if of is None else numbered(result, of)


def make_norm(
    local: Tensor, axes: tuple[str, ...], groups: Groups, order: float, stages: PipelineNorms | None, of: str
) -> Tensor:
    """The norm of a shard of the parameter `of`, sharded over `axes`."""
    norm = local.as_subclass(PendingNorm)
    norm.axes, norm.groups, norm.order = axes, groups, order
    norm.stages, norm.of = stages, of
    return norm


def global_norm(norm: PendingNorm) -> Tensor:
    """The norm of the whole, for who computes with it and with shards at once."""
    return _settle([norm])[0]


@report_failure
def _settle(norms: Sequence[Tensor]) -> list[Tensor]:
    """Plain global norms, with one collective for each axis that cuts any of them."""
    lazy = [norm for norm in norms if isinstance(norm, PendingNorm)]
    if not lazy:
        return list(norms)
    settled: dict[int, Tensor] = {}
    for order in dict.fromkeys(norm.order for norm in lazy):
        same = [norm for norm in lazy if norm.order == order]
        local = torch.stack([norm.as_subclass(Tensor).double() for norm in same])
        total: Tensor = _Total.apply(local, same)  # type: ignore[no-untyped-call]
        settled.update(zip(map(id, same), total, strict=True))
    return [settled[id(norm)].to(norm.dtype) if isinstance(norm, PendingNorm) else norm for norm in norms]


class _Total(torch.autograd.Function):
    """Norms of shards to norms of whole tensors."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, lazy: Sequence[PendingNorm]) -> Tensor:
        order = lazy[0].order
        if order in (float("inf"), float("-inf")):
            total = _over_axes(local, lazy, lambda x, group: _extreme(x, order, group))
            if ctx.needs_input_grad[0]:
                equal = (local == total).double()
                ctx.save_for_backward(equal / _over_axes(equal, lazy, _summed))
        elif order == 0:
            total = _over_axes(local, lazy, _summed)
            ctx.save_for_backward(torch.ones_like(local))
        else:
            total = _over_axes(local.pow(order), lazy, _summed).pow(1.0 / order)
            ctx.save_for_backward(torch.where(local == 0, 0.0, (local / total).pow(order - 1)))
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True reached the norm of a parameter that is split over ranks, whose gradient has none; "
                "write p.square().sum().sqrt(), which has"
            )
        return gradient * ctx.saved_tensors[0], None


def _over_axes(values: Tensor, lazy: Sequence[PendingNorm], reduce: Callable[[Tensor, Group], Tensor]) -> Tensor:
    """Values of shards, reduced over the axes that shard each: one collective for an axis."""
    values = values.clone()
    for groups in dict.fromkeys(norm.groups for norm in lazy):  # several, where parts of a module were compiled
        for name in groups.mesh.names:
            sharding = [at for at, norm in enumerate(lazy) if norm.groups is groups and name in norm.axes]
            if sharding:
                values[sharding] = reduce(values[sharding], groups[name])
    return values


def _of_all_stages(norms: Sequence[Tensor], settled: Sequence[Tensor]) -> list[Tensor]:
    """What is stacked: in a pipeline the norms of all parameters of all ranks, then those of other tensors."""
    known: dict[PipelineNorms, dict[str, Tensor]] = {}
    others: list[Tensor] = []
    for norm, value in zip(norms, settled, strict=True):
        if isinstance(norm, PendingNorm) and norm.stages is not None:
            known.setdefault(norm.stages, {})[norm.of] = value
        else:
            others.append(value)
    return [*(norm for stages, mine in known.items() for norm in stages.norms(mine)), *others]


def _summed(values: Tensor, group: Group) -> Tensor:
    flight_recorder.enter("all_reduce", group.process_group, "norms")
    process_group.all_reduce(values, group.process_group).wait()
    return values


def _extreme(values: Tensor, order: float, group: Group) -> Tensor:
    """Max or min over the axis. A NaN anywhere must win, which a backend's max does not promise."""
    sign = 1.0 if order > 0 else -1.0
    lost = values.isnan()
    both = torch.stack([torch.where(lost, -torch.inf, values * sign), lost.double()])
    flight_recorder.enter("all_reduce", group.process_group, "norms")
    process_group.all_reduce(both, group.process_group, "max").wait()
    return torch.where(both[1] > 0, torch.nan, both[0] * sign)

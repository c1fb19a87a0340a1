"""The functions of torch that take the norm of a tensor, for shards: over everything they are global.

`norms` has the numbers that come out, which communicate with other ranks once somebody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import RankError
from shardwright.storage import sharding_axes

from ..world import Groups
from .local_ops import ShardPlacement, refusal
from .norms import make_norm
from .outside import is_inside


def _norm_of(x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """`torch.linalg.vector_norm` of a shard: lazily global if it is over everything."""
    if dim is not None or keepdim:
        return torch.linalg.vector_norm(_used(x, "vector_norm along dims"), order, dim, keepdim, dtype=dtype)
    return _norms([x], order, dtype=dtype)[0]


def _old_norm(
    x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    """`torch.norm` and `Tensor.norm`; over everything, the Frobenius norm is the 2-norm."""
    if dim is not None or keepdim or out is not None or p == "nuc":
        return torch.norm(_used(x, "norm along dims"), p, dim, keepdim, out, dtype)
    return _norm_of(x, 2 if p in ("fro", None) else p, dtype=dtype)


def _new_norm(x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
    """`torch.linalg.norm`, whose order means a matrix norm if it is given for a matrix."""
    if ord is None and dim is None and not keepdim and others.get("out") is None:
        return _norm_of(x, 2, dtype=others.get("dtype"))
    return torch.linalg.norm(_used(x, "norm along dims"), ord, dim, keepdim, **others)


def _used(x: Any, name: str = "") -> Tensor:
    """What gradients may come back to: a parameter, as it is used outside of the model.

    A norm of a `name` that is not over everything would be about the shard.
    """
    if name and hasattr(x, "spread") and x.groups is not None and not is_inside():
        place = ShardPlacement(x.spec, getattr(x, "lies", x.spread), x.groups)
        if place.axes:
            raise refusal(name, place, x.shape)
    return x.for_use() if hasattr(x, "for_use") else x  # type: ignore[no-any-return]


def _norms(tensors: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> list[Tensor]:
    """`torch._foreach_norm`, for shards and plain tensors mixed."""
    own = [getattr(x, "mine", None) for x in tensors]
    counted = [_used(x) if mine is None else mine for x, mine in zip(tensors, own, strict=True)]
    norms = [x if x.numel() else x.sum(dtype=dtype) for x in counted]  # nothing is 0, and has a gradient too
    full = [at for at, x in enumerate(counted) if x.numel()]
    if full:
        for at, norm in zip(full, torch._foreach_norm([counted[at] for at in full], order, dtype), strict=True):
            norms[at] = norm
    return [_lazy(x, norm, float(order)) for x, norm in zip(tensors, norms, strict=True)]


def _lazy(x: Any, norm: Tensor, order: float) -> Tensor:
    if not hasattr(x, "spread"):
        return norm
    groups: Groups | None = x.groups
    if groups is None:
        raise RankError("a shard without groups does not know its other ranks, so its norm is unknown")
    axes = sharding_axes(x.spread, groups.mesh)
    if not axes and x.stages is None:
        return norm
    return make_norm(norm, axes, groups, order, x.stages, x.spec.name)


NORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm_of,
    torch.linalg.norm: _new_norm,
    torch.norm: _old_norm,
    torch.Tensor.norm: _old_norm,
    torch._foreach_norm: _norms,
}

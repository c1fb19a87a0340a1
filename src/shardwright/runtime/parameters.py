"""Parameters that know they are pieces, so that norms in the user's own loop are global.

`clip_grad_norm_(model.parameters(), 1.0)` in an unmodified script sees local tensors. A
`ShardParameter` is a plain leaf tensor, and reading its `.grad` gives a `ShardGradient`;
the norm of either is a `ShardNorm` (`global_norms`), which `get_total_norm` stacks and so makes
global. A piece that is the same on several ranks counts once. In a pipeline a stack has the
norms of all stages (`stages`).

ZeRO levels 1 and 2 give a parameter a `shard`, the leaf that the optimizer updates: a view
on the rows that this rank owns. At level 1 `shard.grad` is a view on the parameter's
gradient. At level 2 only the share exists, and both `.grad`s read it; its shape is then
the shard's, not the parameter's. A float32 master is such a shard too, with memory of its own;
where ZeRO does not split it, it covers the whole piece, and both have one gradient, in float32.

Norms over the whole tensor are global, and so is what a `GradScaler` finds (`scaling`); anything
else done to a piece is local, and counts once (`outside`). A forward pass should not pay for all
this: run it under `torch._C.DisableTorchFunctionSubclass()`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.errors import InputError, RankError
from shardwright.layout import Layout

from .global_norms import make_norm
from .holding import Held, coordinates, cutting_axes, kept_layout, storage_layout, zero_axes
from .outside import is_use, used
from .packing import Slot, make_slot
from .scaling import UNSCALE, unscale
from .stages import Stages
from .world import Groups

Untouched = torch._C.DisableTorchFunctionSubclass
"""Inside this guard our subclasses behave as plain tensors."""

_GRAD: Any = torch.Tensor.grad  # on the class this is the descriptor, not a gradient
_READ, _WRITE, _DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_ZERO = torch.Tensor.zero_


INSTEAD = (
    "All ranks together: sw.save(path, model, optimizer) writes a checkpoint that loads under any plan, "
    "shardwright.checkpoint.save_weights(path, model) writes safetensors, and model.full_state_dict(rank=0) has "
    "everything whole on rank 0, for torch.save"
)
"""What to do instead of pickling what one rank holds."""


class ShardParameter(torch.nn.Parameter):
    """A piece of a parameter: `held` says of what, `spread` how this tensor lies on the mesh of `groups`."""

    held: Held
    spread: Layout
    groups: Groups | None
    shard: ShardParameter | None
    owner: ShardParameter | None
    slot: Slot | None
    cut_state: frozenset[str] | None  # the optimizer state that is kept as pieces, if that is known
    stages: Stages | None = None  # of the pipeline that it is a part of
    prefix: str = ""  # where in the user's module the model is that it belongs to, if that is a part

    def __new__(
        cls, data: Tensor, held: Held, groups: Groups | None, layout: Layout | None = None, requires_grad: bool = True
    ) -> ShardParameter:
        made = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        made.held = held
        made.spread = layout if layout is not None else held.layout
        made.groups = groups
        made.shard = made.owner = made.slot = made.cut_state = None
        return made

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Untouched():
            if func == _READ:
                return _read(args[0])
            if func in (_WRITE, _DELETE):
                return _write(args[0], args[1] if func == _WRITE else None)
            if func in _NORMS:
                return _NORMS[func](*args, **(kwargs or {}))
            if is_use(func):
                args, kwargs = torch.utils._pytree.tree_map_only(ShardParameter, used, (args, kwargs))
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardParameter:
        """A copy of the piece in the same place of the same mesh; groups are shared, never copied."""
        if id(self) not in memo:
            with Untouched():
                data, needs = self.detach().clone(memory_format=torch.preserve_format), self.requires_grad
            copied = ShardParameter(data, self.held, self.groups, self.spread, needs)
            memo[id(self)] = copied
            if self.shard is not None:
                with Untouched():
                    _attach_shard(copied, self.shard.detach().clone() if self.held.master else None)
            if self.stages is not None:
                join(self.stages, [copied])
        return cast(ShardParameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the parameter that it is on one device, if it is whole here."""
        with Untouched():
            if self.groups is None or self.stages is not None or cutting_axes(self.spread, self.groups.mesh):
                raise InputError(
                    f"{self.held.name} is not whole here: this rank holds {tuple(self.shape)} of {self.held.shape}, or "
                    f"its own stages of a pipeline, and would write a part of the model. {INSTEAD}"
                )
            plain = torch.nn.Parameter(self.detach().as_subclass(Tensor), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with Untouched():
            return f"ShardParameter({self.held.name}, {tuple(self.shape)} of {self.held.shape}, {self.spread})"


def make_parameter(local: Tensor, held: Held, groups: Groups, master: Tensor | None = None) -> ShardParameter:
    """The parameter for a piece that `scatter` cut, with a shard for the optimizer where ZeRO or a master wants one."""
    layout = kept_layout(held, groups.mesh.sizes)
    made = ShardParameter(local, held, groups, layout, requires_grad=held.trainable)
    if (held.level in (1, 2) or held.master) and held.trainable:
        _attach_shard(made, master)
    return made


def true_value(parameter: ShardParameter) -> ShardParameter:
    """What has the parameter's true value: its master, if it has one."""
    return parameter.shard if parameter.held.master and parameter.shard is not None else parameter


def _attach_shard(parameter: ShardParameter, master: Tensor | None = None) -> None:
    held, groups = parameter.held, parameter.groups
    if groups is None:
        raise RankError(f"{held.name} has no groups, so it can't be split again")
    sizes = groups.mesh.sizes
    axes = zero_axes(held, sizes) if held.level in (1, 2) else ()
    if not axes and master is None:
        return
    slot = make_slot(held, axes, sizes, coordinates(groups)) if axes else None
    with Untouched():
        if master is not None:
            rows, parameter.grad_dtype = master, held.true_dtype
        else:
            assert slot is not None
            rows = slot.owned(parameter.detach(), groups[axes].index)
    shard = ShardParameter(rows, held, groups, storage_layout(held, sizes), requires_grad=True)
    shard.owner, shard.slot = parameter, slot
    parameter.shard, parameter.slot = shard, slot


def join(stages: Stages, parameters: Iterable[ShardParameter]) -> None:
    """Make parameters those of a pipeline, of which other ranks have other stages."""
    for parameter in parameters:
        parameter.stages = stages
        if parameter.shard is not None:
            parameter.shard.stages = stages


# -- gradients ---------------------------------------------------------------------------


class ShardGradient(Tensor):
    """The gradient of a piece: `spread` is how it lies on the mesh, `mine` what of it counts in a norm."""

    spread: Layout
    groups: Groups | None
    stages: Stages | None
    held: Held
    mine: Tensor | None  # level 1: the share whose norm is summed over the zero axis too
    whole: Tensor | None  # of a share at level 1: the gradient that it is a view on

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Untouched():
            if func in _NORMS:
                return _NORMS[func](*args, **(kwargs or {}))
            if func is UNSCALE:
                return unscale(*args)
            if func is _ZERO and getattr(args[0], "whole", None) is not None:
                args[0].whole.zero_()
            return func(*args, **(kwargs or {}))


def raw_gradient(parameter: Tensor) -> Tensor | None:
    """The `.grad` that autograd sees."""
    with Untouched():
        return parameter.grad


def set_raw_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    with Untouched():
        parameter.grad = gradient


def _read(parameter: Any) -> Tensor | None:
    if not isinstance(parameter, ShardParameter):
        return cast("Tensor | None", parameter.grad)
    if parameter.shard is not None and keeps_share(parameter):
        share = _dressed(parameter.shard, parameter.shard.grad)
        return share if share is not None else parameter.grad
    if parameter.owner is not None and not keeps_share(parameter):
        return _share_of_owner(parameter, parameter.owner)
    return _dressed(parameter, parameter.grad)


def keeps_share(parameter: Tensor) -> bool:
    """Whether only a share of the gradient is there, as that of the shard."""
    return isinstance(parameter, ShardParameter) and parameter.held.level == 2 and parameter.slot is not None


def _dressed(parameter: ShardParameter, gradient: Tensor | None) -> Tensor | None:
    """The same memory as a `ShardGradient`, kept as `.grad` so that reading twice gives one object."""
    if gradient is None or isinstance(gradient, ShardGradient):
        return gradient
    split = parameter.groups is not None and cutting_axes(parameter.spread, parameter.groups.mesh)
    if not split and parameter.slot is None and parameter.stages is None:
        return gradient
    made = _as_gradient(gradient, parameter)
    if parameter.shard is not None and parameter.slot is not None:
        made.spread = parameter.shard.spread
        made.mine = parameter.slot.owned(gradient, _index(parameter))
    parameter.grad = made
    return made


def _share_of_owner(shard: ShardParameter, owner: ShardParameter) -> Tensor | None:
    if owner.grad is None:
        return None
    if shard.slot is None:
        return _dressed(owner, owner.grad)
    made = _as_gradient(shard.slot.owned(owner.grad, _index(shard)), shard)
    made.whole = owner.grad
    return made


def _as_gradient(gradient: Tensor, parameter: ShardParameter) -> ShardGradient:
    made = gradient.detach().as_subclass(ShardGradient)
    made.spread, made.groups = parameter.spread, parameter.groups
    made.stages, made.held = parameter.stages, parameter.held
    made.mine = made.whole = None
    return made


def _index(parameter: ShardParameter) -> int:
    assert parameter.groups is not None
    return parameter.groups[zero_axes(parameter.held, parameter.groups.mesh.sizes)].index


def _write(parameter: ShardParameter, gradient: Tensor | None) -> None:
    """Setting a gradient; a parameter and its shard are cleared together."""
    if parameter.owner is not None and not keeps_share(parameter):
        if gradient is None or parameter.slot is None:
            parameter.owner.grad = gradient
        else:
            current = _share_of_owner(parameter, parameter.owner)
            if current is None:
                raise RankError(f"{parameter.held.name} has no gradient; set the gradient of the model's parameter")
            current.copy_(gradient)
        return
    other = parameter.shard if keeps_share(parameter) else None
    other = parameter.owner if parameter.owner is not None else other
    if other is not None and gradient is None:
        other.grad = None
    if parameter.shard is not None and other is not None and gradient is not None:
        parameter = parameter.shard if gradient.shape == parameter.shard.shape else parameter
    parameter.grad = gradient


# -- norms -------------------------------------------------------------------------------


def _norm_of(x: Tensor, order: Any = 2, dim: Any = None, keepdim: bool = False, *, dtype: Any = None) -> Any:
    """`torch.linalg.vector_norm` of a piece: lazily global if it is over everything."""
    if dim is not None or keepdim:
        return torch.linalg.vector_norm(_for_use(x), order, dim, keepdim, dtype=dtype)
    return _norms([x], order, dtype=dtype)[0]


def _old_norm(
    x: Tensor, p: Any = "fro", dim: Any = None, keepdim: bool = False, out: Any = None, dtype: Any = None
) -> Any:
    """`torch.norm` and `Tensor.norm`; over everything, the Frobenius norm is the 2-norm."""
    if dim is not None or keepdim or out is not None or p == "nuc":
        return torch.norm(_for_use(x), p, dim, keepdim, out, dtype)
    return _norm_of(x, 2 if p in ("fro", None) else p, dtype=dtype)


def _new_norm(x: Tensor, ord: Any = None, dim: Any = None, keepdim: bool = False, **others: Any) -> Any:
    """`torch.linalg.norm`, whose order means a matrix norm if it is given for a matrix."""
    if ord is None and dim is None and not keepdim and others.get("out") is None:
        return _norm_of(x, 2, dtype=others.get("dtype"))
    return torch.linalg.norm(_for_use(x), ord, dim, keepdim, **others)


def _for_use(x: Tensor) -> Tensor:
    """What gradients may come back to: a parameter, as it is used outside of the model."""
    return used(x) if isinstance(x, ShardParameter) and torch.is_grad_enabled() else x


def _norms(tensors: Sequence[Tensor], order: Any = 2, dtype: Any = None) -> list[Tensor]:
    """`torch._foreach_norm`, for pieces and plain tensors mixed."""
    own = [getattr(x, "mine", None) for x in tensors]
    counted = [_for_use(x) if mine is None else mine for x, mine in zip(tensors, own, strict=True)]
    found = [x if x.numel() else x.sum(dtype=dtype) for x in counted]  # nothing is 0, and has a gradient too
    full = [at for at, x in enumerate(counted) if x.numel()]
    if full:
        for at, norm in zip(full, torch._foreach_norm([counted[at] for at in full], order, dtype), strict=True):
            found[at] = norm
    return [_lazy(x, norm, float(order)) for x, norm in zip(tensors, found, strict=True)]


def _lazy(x: Tensor, norm: Tensor, order: float) -> Tensor:
    groups: Groups | None = getattr(x, "groups", None)
    if not isinstance(x, (ShardParameter, ShardGradient)):
        return norm
    if groups is None:
        raise RankError("a piece without groups does not know its other ranks, so its norm is unknown")
    axes = cutting_axes(x.spread, groups.mesh)
    if not axes and x.stages is None:
        return norm
    return make_norm(norm, axes, groups, order, x.stages, x.held.name)


_NORMS: dict[Callable[..., Any], Callable[..., Any]] = {
    torch.linalg.vector_norm: _norm_of,
    torch.linalg.norm: _new_norm,
    torch.norm: _old_norm,
    torch.Tensor.norm: _old_norm,
    torch._foreach_norm: _norms,
}

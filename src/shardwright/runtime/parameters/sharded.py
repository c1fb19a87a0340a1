"""Parameters that know they are shards, so that norms in the user's own loop are global.

`clip_grad_norm_(model.parameters(), 1.0)` in an unmodified script sees local tensors. A `ShardedParameter` is a plain
leaf tensor, and reading its `.grad` gives a `ShardedGradient`; the norm of either is a `PendingNorm` (`norms`), which
`get_total_norm` makes global. What several ranks hold alike counts once.

ZeRO-1 and ZeRO-2 give a parameter a `shard`, the leaf that the optimizer updates: a view on the rows that this rank
owns. Under ZeRO-1 `shard.grad` is a view on the parameter's gradient, under ZeRO-2 only the shard's exists and both
`.grad`s read it. An fp32 master weight is such a shard too, with memory of its own.

What else may be done to a shard is in `local_ops`, and a penalty counts once (`outside`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from shardwright.errors import InputError, RankError
from shardwright.layout import Layout
from shardwright.storage import ParameterSpec, sharding_axes, storage_layout, stored_layout, zero_axes

from ..world import Groups
from . import local_ops
from .alignment import expect_aligned
from .assign_data import set_data
from .full_tensors import coordinates, true_dtype
from .grad_scaler import UNSCALE, unscale
from .hooks import ParameterHooks, add_hook
from .local_ops import INSTEAD, ShardPlacement
from .norm_functions import NORMS
from .norms import PendingNorm, global_norm
from .outside import is_inside, is_use, used_outside
from .packing import PackSlot, make_slot
from .pipeline_norms import PipelineNorms
from .stage_numbers import combined, is_of_stage, numbered

Untouched = torch._C.DisableTorchFunctionSubclass  # inside this guard our subclasses behave as plain tensors

_GRAD: Any = torch.Tensor.grad  # on the class this is the descriptor, not a gradient
_READ, _WRITE, _DELETE = _GRAD.__get__, _GRAD.__set__, _GRAD.__delete__
_SET_DATA, _ZERO, _HOOK = cast(Any, torch.Tensor.data).__set__, torch.Tensor.zero_, torch.Tensor.register_hook
_HOOK_AFTER = torch.Tensor.register_post_accumulate_grad_hook


class ShardedParameter(torch.nn.Parameter):
    """A shard of a parameter: `spec` says of what, `spread` how this tensor lies on the mesh of `groups`."""

    spec: ParameterSpec
    spread: Layout
    groups: Groups | None
    shard: ShardedParameter | None
    owner: ShardedParameter | None
    slot: PackSlot | None
    follows_shard: bool = False  # its shard has memory of its own (a master weight, say) and the true value
    sharded_keys: frozenset[str] | None  # the optimizer state that is kept as shards, if that is known
    stages: PipelineNorms | None = None  # of the pipeline that it is a part of
    prefix: str = ""  # where in the user's module the model is that it belongs to, if that is a part
    hooks: ParameterHooks  # of the user's
    knows_stages = True

    def __new__(
        cls, data: Tensor, spec: ParameterSpec, groups: Groups | None,
        layout: Layout | None = None, requires_grad: bool = True,
    ) -> ShardedParameter:  # fmt: skip
        parameter = torch.Tensor._make_subclass(cls, data.detach(), requires_grad)
        parameter.spec = spec
        parameter.spread = layout if layout is not None else spec.layout
        parameter.groups = groups
        parameter.shard = parameter.owner = parameter.slot = parameter.sharded_keys = None
        parameter.hooks = ParameterHooks()
        return parameter

    def dress(self, gradient: Tensor) -> Tensor:
        """A gradient of it as who computes with it should see it: a shard, if it is one."""
        return wrap_gradient(self, gradient)

    def for_use(self) -> Tensor:
        """The parameter as it is used outside of the model: what gradients come back to."""
        if not torch.is_grad_enabled():
            return self
        plain, place = used_outside(self), _place(self)
        return plain if place is None or plain is self else wrap_parameter(plain, place, self.stages)

    def full_tensor(self) -> Tensor:
        """The whole parameter, on every rank. All ranks that hold a shard of it must call it."""
        with Untouched():
            place = _place(self)
            return self.detach().as_subclass(Tensor).clone() if place is None else place.full_tensor(self.detach())

    def full_grad(self) -> Tensor | None:
        """The whole gradient, on every rank, or None. All ranks that hold a shard of it must call it."""
        gradient = self.grad
        with Untouched():
            place = _place(gradient)
            if gradient is None or place is None:
                return None if gradient is None else gradient.detach().as_subclass(Tensor).clone()
            return place.full_tensor(gradient.detach())

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Untouched():
            if func == _READ:
                return _read(args[0])
            if func in (_WRITE, _DELETE):
                return _write(args[0], args[1] if func == _WRITE else None)
            if func in NORMS:
                return NORMS[func](*args, **(kwargs or {}))
            if func in (_HOOK, _HOOK_AFTER):
                return add_hook(args[0], args[1], after=func is _HOOK_AFTER)
            if func == _SET_DATA and isinstance(args[0], ShardedParameter) and not args[0].follows_shard:
                return set_data(args[0], args[1], _place(args[0]), _place(args[1]))
            return _outside(func, args, kwargs or {})

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParameter:
        """A copy of the shard; groups are shared, never copied."""
        if id(self) not in memo:
            with Untouched():
                data, needs = self.detach().clone(memory_format=torch.preserve_format), self.requires_grad
            copied = ShardedParameter(data, self.spec, self.groups, self.spread, needs)
            memo[id(self)] = copied
            if self.shard is not None:
                with Untouched():
                    _attach_shard(copied, self.shard.detach().clone() if self.follows_shard else None)
            if self.stages is not None:
                join_pipeline(self.stages, [copied])
        return cast(ShardedParameter, memo[id(self)])

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the parameter that it is on one device, if it is whole here."""
        with Untouched():
            if self.groups is None or self.stages is not None or sharding_axes(self.spread, self.groups.mesh):
                raise InputError(
                    f"{self.spec.name} is not whole here: this rank holds {tuple(self.shape)} of {self.spec.shape}, or "
                    f"its own stages of a pipeline, and would write a part of the model. {INSTEAD}"
                )
            plain = torch.nn.Parameter(self.detach().as_subclass(Tensor), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with Untouched():
            return f"ShardedParameter({self.spec.name}, {tuple(self.shape)} of {self.spec.shape}, {self.spread})"


def make_parameter(
    local: Tensor, spec: ParameterSpec, groups: Groups, own_shard: Tensor | None = None
) -> ShardedParameter:
    """The parameter for a shard, with a shard for the optimizer where one is wanted: `own_shard`, or a view."""
    layout = stored_layout(spec, groups.mesh.sizes)
    parameter = ShardedParameter(local, spec, groups, layout, requires_grad=spec.trainable)
    if (spec.storage.updates_shard or spec.master) and spec.trainable:
        _attach_shard(parameter, own_shard)
    return parameter


def true_value(parameter: ShardedParameter) -> ShardedParameter:
    """What has the parameter's true value: the optimizer's shard, if that has memory of its own."""
    return parameter.shard if parameter.follows_shard and parameter.shard is not None else parameter


def _attach_shard(parameter: ShardedParameter, own_shard: Tensor | None = None) -> None:
    spec, groups = parameter.spec, parameter.groups
    if groups is None:
        raise RankError(f"{spec.name} has no groups, so it can't be split again")
    sizes = groups.mesh.sizes
    axes = zero_axes(spec, sizes) if spec.storage.updates_shard else ()
    if not axes and own_shard is None:
        return
    slot = make_slot(spec, axes, sizes, coordinates(groups)) if axes else None
    with Untouched():
        if own_shard is not None:
            owned, parameter.grad_dtype = own_shard, true_dtype(spec)
        else:
            assert slot is not None
            owned = slot.owned(parameter.detach(), groups[axes].index)
    shard = ShardedParameter(owned, spec, groups, storage_layout(spec, sizes), requires_grad=True)
    shard.owner, shard.slot = parameter, slot
    parameter.shard, parameter.slot, parameter.follows_shard = shard, slot, own_shard is not None


def join_pipeline(stages: PipelineNorms, parameters: Iterable[ShardedParameter]) -> None:
    """Make parameters those of a pipeline, of which other ranks have other stages."""
    for parameter in parameters:
        parameter.stages = stages
        if parameter.shard is not None:
            parameter.shard.stages = stages


class ShardedGradient(Tensor):
    """The gradient of a shard, or what a user made of one: `lies` is how it lies on the mesh.

    A norm is taken of `mine` if that is there, which lies as `spread` says.
    """

    lies: Layout
    spread: Layout
    groups: Groups | None
    stages: PipelineNorms | None
    spec: ParameterSpec
    mine: Tensor | None  # ZeRO-1: the share whose norm is summed over the zero axis too
    full: Tensor | None  # of a share under ZeRO-1: the gradient that it is a view on
    knows_stages = True

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        with Untouched():
            if func in NORMS:
                return NORMS[func](*args, **(kwargs or {}))
            if func is UNSCALE:
                return unscale(*args)
            if func is _ZERO and getattr(args[0], "full", None) is not None:
                args[0].full.zero_()
            return _outside(func, args, kwargs or {})

    def full_tensor(self) -> Tensor:
        """The whole of it, on every rank. All ranks that hold a shard of it must call it."""
        with Untouched():
            place = _place(self)
            return self.detach().as_subclass(Tensor).clone() if place is None else place.full_tensor(self.detach())

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        with Untouched():
            place, copied = _place(self), self.detach().as_subclass(Tensor).clone()
            return copied if place is None else wrap_parameter(copied, place, self.stages)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with Untouched():
            place = _place(self)
            if place is not None:
                raise local_ops.refusal("pickling", place, self.shape)
            return self.detach().as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        with Untouched():
            return f"a shard of {self.spec.name}, {tuple(self.shape)} of {self.spec.shape}, {self.lies}"


def raw_gradient(parameter: Tensor) -> Tensor | None:
    """The `.grad` that autograd sees."""
    with Untouched():
        return parameter.grad


def set_raw_gradient(parameter: Tensor, gradient: Tensor | None) -> None:
    with Untouched():
        parameter.grad = gradient


def _read(parameter: Any) -> Tensor | None:
    if not isinstance(parameter, ShardedParameter):
        return cast("Tensor | None", parameter.grad)
    if parameter.shard is not None and keeps_share(parameter):
        share = _dressed(parameter.shard, parameter.shard.grad)
        return share if share is not None else parameter.grad
    if parameter.owner is not None and not keeps_share(parameter):
        return _share_of_owner(parameter, parameter.owner)
    return _dressed(parameter, parameter.grad)


def keeps_share(parameter: Tensor) -> bool:
    """Whether only a share of the gradient is there, as that of the shard."""
    if not isinstance(parameter, ShardedParameter):
        return False
    return parameter.slot is not None and parameter.spec.storage.shards_gradient


def _dressed(parameter: ShardedParameter, gradient: Tensor | None) -> Tensor | None:
    """The same memory as a `ShardedGradient`, kept as `.grad` so that reading twice gives one object."""
    if gradient is None or isinstance(gradient, ShardedGradient):
        return gradient
    split = parameter.groups is not None and sharding_axes(parameter.spread, parameter.groups.mesh)
    if not split and parameter.slot is None and parameter.stages is None:
        return gradient
    wrapped = _as_gradient(gradient, parameter)
    if parameter.shard is not None and parameter.slot is not None:
        wrapped.spread = parameter.shard.spread  # what `mine` is
        wrapped.mine = parameter.slot.owned(gradient, _index(parameter))
    parameter.grad = wrapped
    return wrapped


def _share_of_owner(shard: ShardedParameter, owner: ShardedParameter) -> Tensor | None:
    if owner.grad is None:
        return None
    if shard.slot is None:
        return _dressed(owner, owner.grad)
    share = _as_gradient(shard.slot.owned(owner.grad, _index(shard)), shard)
    share.full = owner.grad
    return share


def _as_gradient(gradient: Tensor, parameter: ShardedParameter) -> ShardedGradient:
    return _wrap(gradient.detach(), parameter.spec, parameter.spread, parameter.groups, parameter.stages)


def _wrap(
    tensor: Tensor, spec: ParameterSpec, layout: Layout, groups: Groups | None, stages: PipelineNorms | None
) -> ShardedGradient:
    wrapped = tensor.as_subclass(ShardedGradient)
    wrapped.lies = wrapped.spread = layout
    wrapped.spec, wrapped.groups, wrapped.stages = spec, groups, stages
    wrapped.mine = wrapped.full = None
    return wrapped


def wrap_parameter(tensor: Tensor, place: ShardPlacement, stages: PipelineNorms | None = None) -> ShardedGradient:
    """A plain tensor as the shard that it is, with the history that autograd knows."""
    return _wrap(tensor, place.spec, place.layout, place.groups, stages)


def wrap_gradient(parameter: Tensor, gradient: Tensor) -> Tensor:
    """The gradient of a parameter as who computes with it should see it: a shard, if it is one."""
    if not isinstance(parameter, ShardedParameter) or isinstance(gradient, ShardedGradient):
        return gradient
    place = _place(parameter)
    if place is None and parameter.stages is None:
        return gradient
    return _wrap(gradient, parameter.spec, parameter.spread, parameter.groups, parameter.stages)


def _place(x: Any) -> ShardPlacement | None:
    """Which part of what a tensor is; None if it is all of it."""
    if not isinstance(x, (ShardedParameter, ShardedGradient)) or x.groups is None:
        return None
    place = ShardPlacement(x.spec, _layout(x), x.groups)
    return place if place.axes else None


def _layout(x: ShardedParameter | ShardedGradient) -> Layout:
    return x.spread if isinstance(x, ShardedParameter) else x.lies


def _outside(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of parameters or gradients that the user calls, or a backward that is written in Python."""
    if is_inside():
        return func(*args, **kwargs)
    if args and getattr(args[0], "follows_shard", False):
        local_ops.expect_lasting(func, args[0].spec)
    args, kwargs = torch.utils._pytree.tree_map_only(PendingNorm, global_norm, (args, kwargs))
    leaves = torch.utils._pytree.tree_leaves((args, kwargs))
    stages = next((x.stages for x in leaves if is_of_stage(x)), None)
    if is_use(func):
        args, kwargs = torch.utils._pytree.tree_map_only(ShardedParameter, lambda x: x.for_use(), (args, kwargs))
    if stages is not None:
        expect_aligned(func, args, kwargs)
    if any(_place(x) is not None for x in torch.utils._pytree.tree_leaves((args, kwargs))):
        result = local_ops.run(func, args, kwargs, _place, partial(wrap_parameter, stages=stages))
    else:
        result = func(*args, **kwargs)
    return result if stages is None else _of_stage(func, result, leaves)


def _of_stage(func: Callable[..., Any], result: Any, leaves: Sequence[Any]) -> Any:
    """What was made of parameters of a stage: a shard like one of them, or what numbers are made of."""
    name = getattr(func, "__name__", "")
    if type(result) not in (Tensor, tuple, list) or name.startswith(("new_", "_foreach_")) or name.endswith("_like"):
        return result
    if func is torch.autograd.grad:
        return result
    if isinstance(result, Tensor) and result.ndim and name.strip("_") not in ("matmul", "rmatmul", "mm"):
        of = next((x for x in leaves if is_of_stage(x) and x.shape == result.shape), None)
        if of is not None:
            return _wrap(result, of.spec, _layout(of), of.groups, of.stages)
    return numbered(result, combined(func, leaves))


def _index(parameter: ShardedParameter) -> int:
    assert parameter.groups is not None
    return parameter.groups[zero_axes(parameter.spec, parameter.groups.mesh.sizes)].index


def _write(parameter: ShardedParameter, gradient: Tensor | None) -> None:
    """Setting a gradient; a parameter and its shard are cleared together."""
    if parameter.owner is not None and not keeps_share(parameter):
        if gradient is None or parameter.slot is None:
            parameter.owner.grad = gradient
        else:
            current = _share_of_owner(parameter, parameter.owner)
            if current is None:
                raise RankError(f"{parameter.spec.name} has no gradient; set the gradient of the model's parameter")
            current.copy_(gradient)
        return
    other = parameter.owner if parameter.owner is not None else parameter.shard if keeps_share(parameter) else None
    if other is not None and gradient is None:
        other.grad = None
    if parameter.shard is not None and other is not None and gradient is not None:  # ZeRO-2 keeps a share
        if gradient.shape != parameter.shard.shape and parameter.slot is not None:
            gradient = parameter.slot.owned(gradient, _index(parameter)).clone()
        parameter = parameter.shard
    parameter.grad = gradient

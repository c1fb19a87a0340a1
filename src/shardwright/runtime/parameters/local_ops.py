"""What may be done to a shard of a parameter or gradient outside of the model, with the result that one device has.

A shard is one rank's part of a tensor that a plan splits. A user's loop does not know that:

    elementwise   p.mul_(0.9), g.clamp(-1, 1), p * mask     runs on the shard, and gives a shard; a full mask is sharded
    reductions    p.square().sum(), g.abs().max()           run on the shard, then over the ranks that share the tensor
    anything else p[0], p.view(-1), p.tolist()              is refused: it would be about the shard

Norms have a file of their own (`norms`), since clipping must not communicate once for each parameter. What is here asks
only for a tensor's `ShardPlacement`; which tensors are shards is the business of `sharded`.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError
from shardwright.layout import Layout
from shardwright.storage import ParameterSpec, sharding_axes

from ..collectives import comm
from ..world import Groups
from .full_tensors import coordinates, gather_tensor, shard_tensor

_ELEMENTWISE = frozenset(
    "add sub subtract rsub mul multiply div divide true_divide truediv floor_divide floordiv remainder fmod mod pow "
    "float_power neg negative pos positive abs absolute sqrt rsqrt square reciprocal exp exp2 expm1 log log1p log2 "
    "log10 sin cos tan tanh sinh cosh atan asin acos erf sigmoid relu softplus gelu silu leaky_relu softsign hardtanh "
    "clamp clamp_min clamp_max clip sign sgn round floor ceil trunc frac nan_to_num maximum minimum fmax fmin max min "
    "where lerp addcmul addcdiv hypot copysign heaviside xlogy masked_fill isnan isinf isfinite eq ne lt le gt ge "
    "isclose logical_and logical_or logical_xor logical_not bitwise_not bitwise_and bitwise_or and or xor invert "
    "zero fill copy clone detach to type type_as float double half bfloat16 cpu cuda contiguous conj resolve_conj "
    "resolve_neg alias view_as expand_as deepcopy".split()
)
_IN_PLACE = frozenset(f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor".split())
_REFLECTED = frozenset(
    f"__{prefix}{name}__"
    for prefix in ("", "r", "i")
    for name in "add sub mul truediv floordiv mod pow and or xor eq ne lt le gt ge neg pos abs invert deepcopy".split()
)
_ABOUT_IT = frozenset(
    "size dim numel nelement ndimension element_size data_ptr stride storage_offset is_contiguous untyped_storage "
    "is_floating_point is_complex is_signed get_device is_pinned requires_grad_ backward grad retain_grad "
    "register_hook register_post_accumulate_grad_hook new_empty new_zeros new_ones new_full new_tensor empty_like "
    "zeros_like ones_like full_like result_type can_cast is_tensor is_storage is_same_size has_names detach_ _is_view "
    "is_shared record_stream as_subclass __hash__ __dir__ __repr__ __format__ __reduce_ex__ __reduce__ storage "
    "typed_storage _typed_storage dim_order _nested_tensor_size __set__ __delete__ "
    "_has_compatible_shallow_copy_type".split()
)
_TURNED = frozenset({"T", "mT", "H", "mH", "real", "imag"})


@dataclass(frozen=True, slots=True)
class ShardPlacement:
    """Which part of what a tensor is."""

    spec: ParameterSpec
    layout: Layout
    groups: Groups

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes over which ranks have other parts."""
        return sharding_axes(self.layout, self.groups.mesh)

    def covers(self, other: ShardPlacement) -> bool:
        """Whether another tensor of this shape, of whatever model, is split in the same way over the same ranks."""
        alike = self.spec.shape == other.spec.shape and self.layout.shards == other.layout.shards
        return alike and self.groups.mesh == other.groups.mesh

    def shard(self, full: Tensor) -> Tensor:
        """The same part of a whole tensor."""
        return shard_tensor(full, self.spec, self.groups.mesh.sizes, coordinates(self.groups), self.layout)

    def full_tensor(self, local: Tensor) -> Tensor:
        """The whole tensor, on every rank. All ranks must call it."""
        return gather_tensor(local, self.spec, self.groups, self.layout)


INSTEAD = (
    "All ranks together: sw.save(path, model, optimizer) writes a checkpoint that loads under any plan, "
    "shardwright.checkpoint.save_weights(path, model) writes safetensors, and model.full_state_dict(rank=0) has "
    "everything whole on rank 0, for torch.save"
)
"""What to do instead of pickling what one rank holds."""

Find = Callable[[Any], ShardPlacement | None]
Dress = Callable[[Tensor, ShardPlacement], Tensor]


def run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], find: Find, dress: Dress) -> Any:
    """Call a function of tensors of which some are shards. `find` says which, `dress` makes a tensor one."""
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    places = [place for place in map(find, tensors) if place is not None]
    place, name = places[0], str(getattr(func, "__name__", ""))
    if name == "__get__":
        return _read(func, args, place, dress)
    if is_about_tensor(name):
        return func(*args, **kwargs)
    local = next(tensor.shape for tensor in tensors if find(tensor) is not None)
    if name.startswith("_foreach_"):
        return _each(func, name, args, kwargs, find, dress)
    base = _plain_name(name)
    if base in _REDUCTIONS and _is_over_everything(args, kwargs):
        return _REDUCTIONS[base](args[0], place, **kwargs)
    if base in ("equal", "allclose") and all(place.covers(other) for other in places):
        same = func(*_shard_operands(args, place, local, find), **kwargs)
        return bool(_all(torch.tensor([same], device=args[0].device), place))
    if name == "__setitem__" and all(map(place.covers, places)) and _is_masked_fill(args, local, find):
        return func(*args)
    if base not in _ELEMENTWISE:
        raise refusal(name, place, local)
    for other in places:
        if not place.covers(other):
            raise InputError(
                f"{name.strip('_')} of parameters {place.spec.name} and {other.spec.name} outside of the model: they "
                f"are split in different ways, {place.layout} and {other.layout}. Take the whole of the one that is "
                "read, which all ranks must do together (p.full_tensor()), or for EMA use "
                "shardwright.ema.EMA(model)"
            )
    if base in ("view_as", "expand_as") and find(tensors[1]) is None:  # as the shape of what is no shard
        raise refusal(name, place, local)
    in_place = writes(name)
    if in_place and args[0].shape != local:  # what is written to is never cut: that would be a copy
        raise refusal(name, place, local)
    args, kwargs = _shard_operands((args, kwargs), place, local, find)
    result = func(*args, **kwargs)
    if in_place:
        return result
    if not isinstance(result, Tensor) or result.shape != local:
        raise refusal(name, place, local)
    return dress(result, place)


def _is_masked_fill(args: Sequence[Any], local: Sequence[int], find: Find) -> bool:
    """`x[x > 0] = 1.0`: each element by itself, as Rprop does it."""
    target, mask, value = args
    is_mask = isinstance(mask, Tensor) and mask.dtype is torch.bool and find(mask) is not None
    return is_mask and target.shape == mask.shape == local and isinstance(value, int | float)


def writes(name: str) -> bool:
    """Whether a function of this name changes its first argument."""
    return name in _IN_PLACE or (name.endswith("_") and not name.startswith("_") and name not in _ABOUT_IT)


def is_elementwise(name: str) -> bool:
    """Whether a function of this name computes each element from those in the same place."""
    return _plain_name(name) in _ELEMENTWISE


def is_about_tensor(name: str) -> bool:
    """Whether a function of this name says something about a tensor, or makes one like it, and reads no element."""
    return name in _ABOUT_IT or name == "__get__" or name.startswith("_fused_")


def expect_lasting(func: Callable[..., Any], spec: ParameterSpec) -> None:
    """Refuse to change a parameter that has a shard of its own, by which the next step would overwrite it."""
    name, of = getattr(func, "__name__", ""), getattr(getattr(func, "__self__", None), "__name__", "")
    if of == "data" or writes(name):
        what, instead = f"copy of the shard on {spec.storage.shard_device}", "store it otherwise"
        if spec.master:
            what = "cast of its float32 master"
            instead = "turn masters off (precision={'base': ..., 'master': False})"
        raise InputError(
            f"parameter {spec.name} is a {what}, and what is written to it is lost at the next step; change "
            f"{'the masters' if spec.master else 'the shards'}, which optimizer.param_groups hold, before step, read "
            f"values with p.detach(), or {instead}"
        )


def refusal(name: str, place: ShardPlacement, local: Sequence[int]) -> InputError:
    """What can't be done to a shard."""
    if _is_wrapped():
        return InputError(
            "a wrapper of torch.distributed can't be put around a compiled model or a module with compiled parts: "
            f"this rank holds a shard of {place.spec.name}, which sw.parallelize keeps in step already. Leave it out, "
            "and with accelerate leave the model and its optimizer out of accelerator.prepare"
        )
    op = name.strip("_") or "this"
    return InputError(
        f"{op} of parameter {place.spec.name} (or of its gradient) outside of the model: this rank holds a shard of "
        f"shape {tuple(local)} of {place.spec.shape}, and the result would be about that shard. Elementwise ops, norms "
        "and sums over everything work on shards; for others take the whole tensor, which all ranks must do together: "
        "p.full_tensor(), p.full_grad() or model.full_state_dict(); or do it in forward, or before parallelize"
    )


def _is_wrapped() -> bool:
    """Whether it is FSDP or the like that does something to a shard, as to a whole parameter."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if str(frame.f_globals.get("__name__", "")).startswith(_WRAPPING):
            return True
    return False


_WRAPPING = ("torch.distributed.fsdp", "torch.distributed._composable", "torch.nn.parallel")


def _plain_name(name: str) -> str:
    if name in _REFLECTED:
        inner = name.strip("_")
        return inner if inner in _ELEMENTWISE else inner[1:]
    return name.rstrip("_") if not name.startswith("_") else name


def _read(func: Any, args: tuple[Any, ...], place: ShardPlacement, dress: Dress) -> Any:
    """A property: `.data` is the shard again, `.T` would turn it."""
    of = str(getattr(getattr(func, "__self__", None), "__name__", ""))
    if of in _TURNED:
        raise refusal(of, place, args[0].shape)
    value = func(*args)
    return dress(value, place) if of == "data" else value


def _each(func: Any, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], find: Find, dress: Dress) -> Any:
    """`torch._foreach_mul` and the like, as optimizers and clipping use them: elementwise, tensor by tensor."""
    results = func(*args, **kwargs)
    if results is None:  # in place, in other versions of torch
        return results
    wrapped = []
    for old, new in zip(args[0], results, strict=True):
        place = find(old)
        if place is not None and new.shape != old.shape:
            raise refusal(name, place, old.shape)
        wrapped.append(new if place is None else dress(new, place))
    return type(results)(wrapped)


def _shard_operands(operands: Any, place: ShardPlacement, local: torch.Size, find: Find) -> Any:
    """Plain tensors that have the whole size of a split dim, such as a mask, sharded alike.

    What is the same for all shards, such as the loss, gets the sum of their gradients.
    """
    full_shape = place.spec.shape

    def shared(tensor: Tensor) -> Tensor:
        for axis in place.axes:
            tensor = comm.replicate(tensor, place.groups[axis])
        return tensor

    def sharding(tensor: Tensor) -> Tensor:
        if find(tensor) is not None or tensor.ndim > len(full_shape):
            return tensor
        sizes = (1,) * (len(full_shape) - tensor.ndim) + tuple(tensor.shape)
        if all(size == 1 for size, full, mine in zip(sizes, full_shape, local, strict=True) if full != mine):
            return shared(tensor) if tensor.requires_grad and torch.is_grad_enabled() else tensor
        if not any(
            size == full != mine and size != 1 for size, full, mine in zip(sizes, full_shape, local, strict=True)
        ):
            return tensor
        if any(size not in (1, full) for size, full in zip(sizes, full_shape, strict=True)):
            return tensor
        if tensor.requires_grad and torch.is_grad_enabled():
            raise refusal("an op with a whole tensor that needs a gradient", place, local)
        return place.shard(tensor.expand(full_shape))

    return torch.utils._pytree.tree_map_only(Tensor, sharding, operands)


# -- reductions over everything ---------------------------------------------------------------


def _is_over_everything(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    return len(args) == 1 and all(key == "dtype" or value is None for key, value in kwargs.items())


def _sum(x: Tensor, place: ShardPlacement, dtype: torch.dtype | None = None) -> Tensor:
    total = x.as_subclass(Tensor).sum(dtype=dtype)
    for axis in place.axes:
        total = comm.all_reduce(total, place.groups[axis])
    return total


def _mean(x: Tensor, place: ShardPlacement, dtype: torch.dtype | None = None) -> Tensor:
    return _sum(x, place, dtype) / math.prod(place.spec.shape)


def _extreme(op: Any, x: Tensor, place: ShardPlacement) -> Tensor:
    if x.requires_grad and torch.is_grad_enabled():
        raise refusal(f"the gradient of a {op}imum", place, x.shape)
    worst = -math.inf if op == "max" else math.inf
    finite = torch.where(x.isnan(), worst, x) if x.is_floating_point() else x
    some = (finite.amax() if op == "max" else finite.amin()) if x.numel() else x.new_tensor(worst)
    lost = x.isnan().any().to(torch.float64)
    for axis in place.axes:  # a NaN anywhere must win, which a backend does not promise
        some = comm.all_reduce_no_grad(some, place.groups[axis], op)
        lost = comm.all_reduce_no_grad(lost, place.groups[axis], "max")
    return torch.where(lost > 0, torch.nan, some) if x.is_floating_point() else some


def _any(x: Tensor, place: ShardPlacement) -> Tensor:
    return _sum(x.as_subclass(Tensor).bool().to(torch.int64), place) > 0


def _all(x: Tensor, place: ShardPlacement) -> Tensor:
    return _sum((~x.as_subclass(Tensor).bool()).to(torch.int64), place) == 0


def _count_nonzero(x: Tensor, place: ShardPlacement) -> Tensor:
    return _sum((x.as_subclass(Tensor) != 0).to(torch.int64), place)


_REDUCTIONS: dict[str, Callable[..., Tensor]] = {
    "sum": _sum,
    "mean": _mean,
    "max": lambda x, place: _extreme("max", x, place),
    "amax": lambda x, place: _extreme("max", x, place),
    "min": lambda x, place: _extreme("min", x, place),
    "amin": lambda x, place: _extreme("min", x, place),
    "any": _any,
    "all": _all,
    "count_nonzero": _count_nonzero,
}

"""The user's optimizer, kept as the object it is, working on shards.

`adopt` puts the shards in the places of the original parameters, in the same param groups,
so that schedulers made before or after, hooks and `zero_grad` keep working. Then it
depends on what the optimizer's update needs to see:

    update of an element needs    optimizers                   what step does
    --------------------------    --------------------------   ------------------------------------
    that element                  SGD, Adam, AdamW, ..         runs on shards
    its whole tensor              Adafactor, Muon              gathers, steps and cuts, one tensor at a time
    maybe everything              LBFGS, any unknown class     gathers all, steps once, cuts

Under ZeRO-1 and ZeRO-2 the param groups hold the `shard` of each parameter, a view on the
rows that this rank owns, and a hook after step gathers the updated rows into the parameters
(`refresh`). So they do where parameters have float32 masters.

An unknown class is taken for one that needs everything: that is always right, and says in a
warning what it costs and how to declare it elementwise (`elementwise = True` on the class).
State that has the parameter's shape is kept cut like the parameter, whatever the kind.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from types import FrameType
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as hooked
from torch.utils._foreach_utils import _device_has_foreach_support

from shardwright.errors import InputError

from ..parameters.full_tensors import coordinates, gather_tensor, shard_tensor, true_dtype
from ..parameters.outside import as_model
from ..parameters.refresh import Refresh
from ..parameters.sharded import ShardedParameter, Untouched, raw_gradient
from .fused import fused
from .state import remember_places

Sees = Literal["element", "tensor", "everything"]

ELEMENTWISE = frozenset(
    f"{name}.step"
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
PER_TENSOR = frozenset({"Adafactor.step", "Muon.step"})
EVERYTHING = frozenset({"LBFGS.step"})


_UNADOPTED = f"{__package__}.unadopted"  # whose hook may stay when a step runs without our interceptions

Optimizers = Optimizer | Sequence[Optimizer] | None


def several(optimizers: Optimizers) -> list[Optimizer]:
    """Optimizers as a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


def known_sight(optimizer: Optimizer) -> Sees | None:
    """What an update looks at, judged by whose `step` runs; None for a class, or a subclass with its own, unknown."""
    declared = getattr(optimizer, "elementwise", None)
    if declared is not None:
        return "element" if declared else "everything"
    step = type(optimizer).step
    name = step.__qualname__ if step.__module__.startswith("torch.optim.") else ""
    if name in ELEMENTWISE:
        return "element"
    if name in PER_TENSOR:
        return "tensor"
    return "everything" if name in EVERYTHING else None


def parameters_seen_by(optimizer: Optimizer) -> Sees:
    """What an update looks at; of an unknown class everything, which is said."""
    known = known_sight(optimizer)
    if known is None:
        kind = type(optimizer).__name__
        warnings.warn(
            f"shardwright does not know the optimizer {kind}: every step gathers all its parameters and gradients "
            f"in full on every rank. If an update needs only the same element of parameter, gradient and state, set "
            f"{kind}.elementwise = True before parallelize, and it runs on the shards.",
            stacklevel=3,
        )
    return known or "everything"


def adopt(optimizer: Optimizer, replaced: Mapping[Parameter, ShardedParameter | None]) -> None:
    """Make an optimizer work on the shards that replace its parameters (None: not held on this rank)."""
    kind = _kind(optimizer, elsewhere=any(new is None for new in replaced.values()))
    remember_places(optimizer, {old: None if new is None else leaf_of(new) for old, new in replaced.items()})
    placed: dict[int, int] = {}
    for group in optimizer.param_groups:
        leaves: list[Any] = []
        for old in group["params"]:
            new = replaced.get(old, old)
            state = optimizer.state.pop(old, None)
            if new is None:
                continue
            leaf = leaf_of(new)
            if placed.setdefault(id(leaf), id(old)) != id(old):  # tied weights are one parameter
                continue
            leaves.append(leaf)
            if state is not None:
                optimizer.state[leaf] = _shard_state(state, leaf)
        group["params"][:] = leaves  # in place: LBFGS keeps the list itself
        _keep_foreach(group, leaves)
    if kind != "element":
        _around_step(optimizer, _step_each if kind == "tensor" else _step_gathered)
    else:
        own = {id(leaf_of(new)) for new in replaced.values() if new is not None}
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if id(leaf) in own]
        owners = [leaf.owner for leaf in leaves if getattr(leaf, "owner", None) is not None]
        if owners:
            refresh = Refresh(owners)
            optimizer.register_step_post_hook(partial(_refresh, refresh))
        _around_step(optimizer, _step_plainly)


def _kind(optimizer: Optimizer, elsewhere: bool) -> Sees:
    """What an update looks at. What can't do here what it does on one device is refused."""
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise InputError(
            "SparseAdam updates the rows that a sparse gradient has, and gradients are dense here, since they are "
            "summed over ranks; use Adam, and build the Embedding with sparse=False"
        )
    kind, name = parameters_seen_by(optimizer), type(optimizer).__name__
    if kind == "everything" and elsewhere:
        raise InputError(
            f"an update of {name} may need all parameters at once, and in a pipeline no rank has them; use a plan "
            f"without pp, or set {name}.elementwise = True if an update of an element needs that element only"
        )
    if kind != "element" and _is_stepping(optimizer):
        raise InputError(
            f"the model is compiled within {name}.step(closure), which has begun on the original parameters and would "
            "take shards for full tensors; pass example=(...) to parallelize, or call the model once before"
        )
    return kind


def _is_stepping(optimizer: Optimizer) -> bool:
    """Whether a step of this optimizer is running, further up."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == "step" and frame.f_locals.get("self") is optimizer:
            return True
        frame = frame.f_back
    return False


def load_whole(optimizer: Optimizer, saved: Mapping[str, Any], names: Sequence[str], of: Callable[[Any], str]) -> None:
    """Take over a state dict that the optimizer had on one device. `names` are its parameters' in the order of then."""
    leaves = {of(leaf): leaf for group in optimizer.param_groups for leaf in group["params"]}
    for group, before in zip(optimizer.param_groups, saved["param_groups"], strict=True):
        group.update({key: value for key, value in before.items() if key != "params"})
    for number, name in enumerate(names):
        if number in saved["state"] and name in leaves:
            leaf = leaves[name]
            state = {key: _placed(value, leaf) for key, value in saved["state"][number].items()}
            optimizer.state[leaf] = _shard_state(state, leaf)


def _placed(value: Any, leaf: Tensor) -> Any:
    """On the device of what it belongs to, if it has its shape; a count of steps stays where it is."""
    return value.to(leaf.device) if isinstance(value, Tensor) and value.dim() else value


def leaf_of(parameter: Tensor) -> Tensor:
    """What the optimizer updates for a parameter of the model: its shard, if it has one."""
    shard = getattr(parameter, "shard", None)
    return parameter if shard is None else shard


def _keep_foreach(group: dict[str, Any], leaves: Sequence[Tensor]) -> None:
    """torch picks its fast foreach path by the exact type of parameters; ours can use it too."""
    if group.get("foreach", True) is None and not group.get("fused") and leaves:
        device = leaves[0].device
        if device.type != "cpu" and _device_has_foreach_support(device):
            group["foreach"] = True


# -- a step around the optimizer's own -------------------------------------------------------

Inner = Callable[..., Any]
Closure = Callable[[], Any]


def _around_step(optimizer: Optimizer, around: Callable[[Optimizer, Inner, Closure | None], Any]) -> None:
    """Replace `step` by a bound method that carries over what a scheduler marked the inner one with."""
    inner = optimizer.step

    def step(self: Optimizer, closure: Closure | None = None) -> Any:
        if closure is None:
            _expect_summed(self)
        return around(self, inner, closure)

    step.__dict__.update(getattr(inner, "__dict__", {}))
    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]


def _expect_summed(optimizer: Optimizer) -> None:
    """Refuse a step with gradients that are still this rank's own."""
    for group in optimizer.param_groups:
        for leaf in group["params"]:
            owner = getattr(leaf, "owner", None)
            parameter = leaf if owner is None else owner
            if getattr(parameter, "unsummed", False) and raw_gradient(parameter) is not None:
                raise InputError(
                    "step() with gradients that were not summed over ranks: the last backward ran under no_sync, or "
                    "accumulate= counts on more backwards before a step; leave no_sync for the last backward of a step"
                )


def _step_plainly(optimizer: Optimizer, inner: Inner, closure: Closure | None) -> Any:
    """An update of elements has no use for our interceptions, and they cost; the user's own code may clip, and has."""
    before = (
        optimizer._optimizer_step_pre_hooks,
        [h for h in hooked._global_optimizer_pre_hooks.values() if getattr(h, "__module__", "") != _UNADOPTED],
    )
    after = (*optimizer._optimizer_step_post_hooks.values(), *hooked._global_optimizer_post_hooks.values())
    if closure is not None or any(before):
        return inner(closure)
    own = all(getattr(hook, "func", None) is _refresh for hook in after)
    with fused(optimizer), as_model() if own else nullcontext(), nullcontext() if after else Untouched():
        return inner()


def _refresh(refresh: Refresh, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """A hook after step, of ours."""
    refresh()


# -- optimizers that must see whole tensors ---------------------------------------------------


def _step_gathered(optimizer: Optimizer, inner: Inner, closure: Closure | None) -> Any:
    with _gathered_groups(optimizer, optimizer.param_groups) as shown:
        return inner() if closure is None else inner(_on_shards(optimizer, shown, closure))


def _step_each(optimizer: Optimizer, inner: Inner, closure: Closure | None) -> Any:
    loss = None
    if closure is not None:
        with torch.enable_grad():
            loss = closure()
    groups = optimizer.param_groups
    before = [list(group["params"]) for group in groups]
    try:
        for group, leaves in zip(groups, before, strict=True):
            optimizer.param_groups = [group]
            for leaf in leaves:
                if leaf.grad is not None:
                    group["params"][:] = [leaf]
                    with _gathered_groups(optimizer, [group]):
                        inner()
    finally:
        optimizer.param_groups = groups
        for group, leaves in zip(groups, before, strict=True):
            group["params"][:] = leaves
    return loss


@contextmanager
def _gathered_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[list[tuple[Any, Tensor]]]:
    """Within this the param groups hold whole parameters with whole gradients and state."""
    shown: list[tuple[Any, Tensor]] = []
    before = [list(group["params"]) for group in groups]
    for group in groups:
        full_parameters = [_gathered(leaf) for leaf in group["params"]]
        shown += zip(group["params"], full_parameters, strict=True)
        group["params"][:] = full_parameters
    for leaf, full in shown:
        if leaf in optimizer.state and leaf is not full:
            optimizer.state[full] = _gather_state(optimizer.state.pop(leaf), leaf)
    try:
        yield shown
    finally:
        _write_back(shown)
        for leaf, full in shown:
            if full in optimizer.state and leaf is not full:
                optimizer.state[leaf] = _shard_state(optimizer.state.pop(full), leaf)
        for group, leaves in zip(groups, before, strict=True):
            group["params"][:] = leaves


def _gathered(leaf: Any) -> Tensor:
    """A whole parameter with a whole gradient, or the tensor itself if it is not a shard."""
    if not isinstance(leaf, ShardedParameter) or leaf.groups is None:
        return leaf  # type: ignore[no-any-return]
    gradient = leaf.grad
    with Untouched():
        full = Parameter(gather_tensor(leaf, leaf.spec, leaf.groups, leaf.spread), requires_grad=leaf.requires_grad)
        if gradient is not None:
            full.grad = gather_tensor(gradient, leaf.spec, leaf.groups, leaf.spread)
    return full


@torch.no_grad()
def _write_back(shown: Sequence[tuple[Any, Tensor]]) -> None:
    """Cut the whole parameters; a shard's owner is written whole, so nothing has to be gathered."""
    for leaf, full in shown:
        if isinstance(leaf, ShardedParameter) and leaf is not full:
            target = leaf if leaf.owner is None else leaf.owner
            with Untouched():
                target.copy_(_shard(full, target))
                if target.follows_shard:
                    leaf.copy_(_shard(full, leaf))


def _on_shards(
    optimizer: Optimizer, shown: Sequence[tuple[Any, Tensor]], closure: Callable[[], Any]
) -> Callable[[], Any]:
    """A closure runs the model and `zero_grad`: it needs shards, up to date; then its gradients are gathered."""

    def run() -> Any:
        _write_back(shown)
        leaves = {id(full): leaf for leaf, full in shown}
        before = [list(group["params"]) for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["params"][:] = [leaves[id(full)] for full in group["params"]]
        with torch.enable_grad():
            loss = closure()
        for group, parameters in zip(optimizer.param_groups, before, strict=True):
            group["params"][:] = parameters
        for leaf, full in shown:
            if leaf is not full:
                full.grad = _gathered(leaf).grad
        return loss

    return run


def _shard(full: Tensor, leaf: ShardedParameter) -> Tensor:
    assert leaf.groups is not None
    return shard_tensor(full, leaf.spec, leaf.groups.mesh.sizes, coordinates(leaf.groups), leaf.spread)


def _shard_state(state: dict[str, Any], leaf: Any) -> dict[str, Any]:
    """State as kept: what has the whole parameter's shape is cut as the parameter is, in a master's dtype."""
    if not isinstance(leaf, ShardedParameter) or not leaf.spec.shape:
        return state
    fits = {k for k, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == leaf.spec.shape}
    leaf.sharded_keys = frozenset(fits)
    return {key: _shard(_widened(value, leaf), leaf) if key in fits else value for key, value in state.items()}


def _widened(value: Tensor, leaf: ShardedParameter) -> Tensor:
    """State that was made beside a narrow parameter belongs to its master."""
    return value.to(true_dtype(leaf.spec)) if leaf.spec.master and value.is_floating_point() else value


def _gather_state(state: dict[str, Any], leaf: Any) -> dict[str, Any]:
    """The inverse of `_shard_state`. Names decide: by its shape a small factor might pass for a shard on some ranks."""
    if not isinstance(leaf, ShardedParameter) or leaf.groups is None or not leaf.spec.shape:
        return state
    names = leaf.sharded_keys
    if names is None:  # just loaded
        names = frozenset(k for k, v in state.items() if isinstance(v, Tensor) and v.shape == leaf.shape)
    return {k: gather_tensor(v, leaf.spec, leaf.groups, leaf.spread) if k in names else v for k, v in state.items()}

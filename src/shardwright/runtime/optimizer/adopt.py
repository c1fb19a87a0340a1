"""The user's optimizer, kept as the object it is, working on shards.

`adopt` puts the shards in the places of the original parameters, in the same param groups,
so that schedulers made before or after, hooks and `zero_grad` keep working. Then it
depends on what the optimizer's update needs to see:

    update of an element needs    optimizers                   what step does
    --------------------------    --------------------------   -----------------------------------------------
    that element                  SGD, Adam, AdamW, ..         runs on shards
    its matrix, its last 2 dims   Muon                         each matrix is updated by one rank (`owners`)
    its whole tensor              Adafactor                    each tensor is updated by one rank (`owners`)
    maybe everything              LBFGS, any unknown class     gathers all, steps once, shards (`gathered`)

Under ZeRO-1 and ZeRO-2 the param groups hold the `shard` of each parameter, a view on the
rows that this rank owns, and a hook after step gathers the updated rows into the parameters
(`refresh`). So they do where parameters have float32 masters.

An unknown class is taken for one that needs everything: that is always right, and says in a
warning what it costs and how to declare less (`update_needs = "tensor"` on the class, say).
State that has the parameter's shape is sharded like the parameter, whatever the kind.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.optim import optimizer as hooked
from torch.utils._foreach_utils import _device_has_foreach_support

from shardwright.errors import InputError

from ..parameters.outside import as_model
from ..parameters.refresh import Refresh
from ..parameters.sharded import ShardedParameter, Untouched, raw_gradient
from .declared import step_checked
from .fused import fused
from .gathered import Closure, Inner, shard_state, step_gathered
from .owners import step_by_matrix_owners, step_by_owners
from .state import remember_places

Sees = Literal["element", "matrix", "tensor", "everything"]

ELEMENTWISE = frozenset(
    f"{name}.step"
    for name in ("SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")
)
PER_MATRIX = frozenset({"Muon.step"})
PER_TENSOR = frozenset({"Adafactor.step"})
EVERYTHING = frozenset({"LBFGS.step"})


_UNADOPTED = f"{__package__}.unadopted"  # whose hook may stay when a step runs without our interceptions

Optimizers = Optimizer | Sequence[Optimizer] | None

_WHOLE_STEPS: Mapping[Sees, Callable[[Optimizer, Inner, Closure | None], Any]] = {
    "matrix": step_by_matrix_owners,
    "tensor": step_by_owners,
    "everything": step_gathered,
}


def several(optimizers: Optimizers) -> list[Optimizer]:
    """Optimizers as a list."""
    if optimizers is None:
        return []
    return list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]


def known_sight(optimizer: Optimizer) -> Sees | None:
    """What an update looks at, judged by whose `step` runs; None for a class, or a subclass with its own, unknown."""
    declared, elementwise = getattr(optimizer, "update_needs", None), getattr(optimizer, "elementwise", None)
    if declared is not None:
        if declared not in get_args(Sees):
            raise InputError(
                f"{type(optimizer).__name__}.update_needs is {declared!r}; it says what the update of an element "
                f"needs to see: {', '.join(map(repr, get_args(Sees)))}"
            )
        return cast(Sees, declared)
    if elementwise is not None:
        return "element" if elementwise else "everything"
    name = type(optimizer).step.__qualname__ if _is_of_torch(optimizer) else ""
    if name in ELEMENTWISE:
        return "element"
    if name in PER_MATRIX | PER_TENSOR:
        return "matrix" if name in PER_MATRIX else "tensor"
    return "everything" if name in EVERYTHING else None


def _is_of_torch(optimizer: Optimizer) -> bool:
    """Whether the step that runs is torch's."""
    return type(optimizer).step.__module__.startswith("torch.optim.")


def parameters_seen_by(optimizer: Optimizer) -> Sees:
    """What an update looks at; of an unknown class everything, which is said."""
    known = known_sight(optimizer)
    if known is None:
        kind = type(optimizer).__name__
        warnings.warn(
            f"shardwright does not know the optimizer {kind}: every step gathers all its parameters and gradients "
            f"in full on every rank. If an update needs only the same element of parameter, gradient and state, set "
            f"{kind}.elementwise = True before parallelize, and it runs on the shards; if it needs one tensor (a norm "
            f'of it, its rows), set {kind}.update_needs = "tensor", and each tensor is updated by one rank.',
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
                optimizer.state[leaf] = shard_state(state, leaf)
        group["params"][:] = leaves  # in place: LBFGS keeps the list itself
        _keep_foreach(group, leaves)
    if kind != "element":
        _around_step(optimizer, _WHOLE_STEPS[kind])
    else:
        own = {id(leaf_of(new)) for new in replaced.values() if new is not None}
        leaves = [leaf for group in optimizer.param_groups for leaf in group["params"] if id(leaf) in own]
        owners = [leaf.owner for leaf in leaves if getattr(leaf, "owner", None) is not None]
        if owners:
            refresh = Refresh(owners)
            optimizer.register_step_post_hook(partial(_refresh, refresh))
        _around_step(optimizer, _step_plainly if _is_of_torch(optimizer) else step_checked)


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
            f"without pp, or set {name}.elementwise = True if an update of an element needs that element only, or "
            f'{name}.update_needs = "tensor" if it needs no other tensor'
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
            optimizer.state[leaf] = shard_state(state, leaf)


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

"""Hooks that a user puts on a parameter: they see the true gradient of each backward, as on one device.

Autograd would call them with this rank's part of the gradient, before it is summed over ranks: right for a hook that
only scales, wrong for one that clips. So they are kept here, and whoever makes a gradient true calls them:

    the gradient is                     who calls them
    ---------------------------------   -----------------------------------------------
    complete when it arrives            autograd, through a hook of ours
    summed in a bucket                  the bucket, before it hands the gradient out
    summed as a share (ZeRO-3)          the unit, before it adds the share to `.grad`

A hook of a parameter that is split sees a shard, with which it can do what `local_ops` allows.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from shardwright.errors import InputError

from .gradient_destination import destination_of, leaf_node
from .outside import as_user

Hook = Callable[[Any], Any]


@dataclass(slots=True, eq=False)
class ParameterHooks:
    """Of one parameter, in the order in which they were registered."""

    before: dict[int, Hook] = field(default_factory=OrderedDict)  # see the gradient, and may give another
    after: dict[int, Hook] = field(default_factory=OrderedDict)  # see the parameter, whose `.grad` is there
    summed_later: bool = False  # whether autograd sees a part of the gradient only
    in_shares: bool = False  # whether that is because a unit of ZeRO-3 adds it to `.grad`, past autograd
    watched: bool = False  # whether autograd has been asked to call them

    def __bool__(self) -> bool:
        return bool(self.before or self.after)

    def add(self, hook: Hook, after: bool = False) -> RemovableHandle:
        hooks = self.after if after else self.before
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    def change(self, gradient: Tensor) -> Tensor:
        """What the hooks make of a true gradient."""
        with as_user():
            for hook in tuple(self.before.values()):
                result = hook(gradient)
                if result is not None:
                    if not isinstance(result, Tensor) or result.shape != gradient.shape:
                        raise InputError(
                            f"a hook on a parameter got a gradient of shape {tuple(gradient.shape)} and gave back "
                            f"{tuple(result.shape) if isinstance(result, Tensor) else result!r}; return the same "
                            "shape, or None"
                        )
                    gradient = result
        return gradient

    def tell(self, parameter: Tensor) -> None:
        """The gradient is in `.grad`."""
        with as_user(), torch.no_grad():
            for hook in tuple(self.after.values()):
                hook(parameter)


def check_put_off(hooks: ParameterHooks, name: str) -> None:
    """Hooks see the gradient of each backward, and under `no_sync` nobody ever has it."""
    if hooks:
        raise InputError(
            f"parameter {name} has hooks, which see the gradient of each backward, and no_sync (or accumulate=) puts "
            "off the sum that makes it; sync every backward, or do in the loop what the hook does, before the step"
        )


def add_hook(parameter: Any, hook: Hook, after: bool) -> RemovableHandle:
    """Keep a hook of a `ShardedParameter`, and let autograd call it where the gradient is complete as it comes."""
    if not parameter.requires_grad:
        raise InputError(f"parameter {parameter.spec.name} needs no gradient, so a hook on it would never run")
    _watch(parameter)
    return parameter.hooks.add(hook, after)  # type: ignore[no-any-return]


def take_hooks(parameter: Any, original: Any) -> None:
    """Continue with the hooks of the parameter that a shard stands for. Its handles still remove them."""
    before, after = original._backward_hooks, getattr(original, "_post_accumulate_grad_hooks", None)
    if before or after:
        parameter.hooks.before = before or parameter.hooks.before
        parameter.hooks.after = after or parameter.hooks.after
        _watch(parameter)


def _watch(parameter: Any) -> None:
    """Call the hooks of a parameter from autograd, unless its gradient is summed later."""
    hooks: ParameterHooks = parameter.hooks
    if hooks.watched:
        return

    def before(gradient: Tensor | None) -> Tensor | None:
        if gradient is None or not hooks.before or (hooks.summed_later and not hooks.in_shares):
            return None
        if hooks.in_shares and destination_of(leaf_node(parameter)) == "grad":
            raise InputError(
                f"parameter {parameter.spec.name} has hooks and gets one gradient through the model and another from "
                "outside of it; under ZeRO-3 they never meet before .grad. Use zero2, or remove the hook"
            )
        return hooks.change(parameter.dress(gradient))

    def after(leaf: Tensor) -> None:
        if not hooks.summed_later:
            hooks.tell(parameter)

    with torch._C.DisableTorchFunctionSubclass():
        needs, hooks.watched = parameter.requires_grad, True
        parameter.requires_grad_(True)  # torch refuses hooks on what is frozen, even if only for now
        parameter.register_hook(before)
        parameter.register_post_accumulate_grad_hook(after)
        parameter.requires_grad_(needs)

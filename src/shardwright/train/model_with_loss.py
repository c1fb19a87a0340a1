"""A model and a loss as one module, so that the loss is compiled too, and exact."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ..errors import InputError
from .batches import LABELS

Loss = Callable[..., Tensor]


def with_loss(model: nn.Module, loss: Loss, target: str | None = None) -> nn.Module:
    """A module with the model's parameters under their names, whose forward returns the loss.

    The target is the last argument of a tuple; of a dict, the key `target`, else labels, label, target...
    The rest goes to the model. Parameters and buffers of the loss are under `loss.`.
    """
    if not callable(loss):
        raise InputError(f"loss={loss!r} can't be called; a loss is a module or a function of (output, target)")
    if model._forward_hooks or model._forward_pre_hooks:
        raise InputError("the model has forward hooks, which loss= does not support; compute the loss in its forward")
    kind, own = type(model), isinstance(loss, nn.Module)
    if own and (hasattr(model, "loss") or "loss" in model._modules):
        raise InputError("the model has an attribute 'loss'; compute the loss in its forward, and leave out loss=")

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
        args, kwargs, wanted = split(args, kwargs, target)
        output = kind.forward(self, *args, **kwargs)
        criterion: Any = self._modules["loss"] if own else loss  # a copy of this module has a copy of it
        value: Tensor = criterion(output, wanted)
        return value

    joined = copy.copy(model)
    joined._modules = dict(model._modules)
    if isinstance(loss, nn.Module):
        joined._modules["loss"] = loss
    joined.__class__ = type(kind.__name__, (kind,), {"forward": forward, "__module__": kind.__module__})
    return joined


def split(
    args: tuple[Any, ...], kwargs: dict[str, Any], target: str | None
) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
    """Split the arguments of a call into the model's and the target."""
    if kwargs or target is not None:
        named = [target] if target is not None else [name for name in LABELS if name in kwargs]
        if not named or named[0] not in kwargs:
            raise InputError(
                f"the batch has {', '.join(kwargs) or 'no names'}, and no target for the loss; name it: target='labels'"
            )
        return args, {name: value for name, value in kwargs.items() if name != named[0]}, kwargs[named[0]]
    if len(args) < 2:
        raise InputError("with loss= a batch is (input, target) or a dict with labels; got a single tensor")
    return args[:-1], {}, args[-1]

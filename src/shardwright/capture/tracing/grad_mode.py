"""Whether gradients were on, noted on every node as it is traced.

`torch.export` records `torch.no_grad()` as a region, but loses it where it lies inside of an autocast
region, so that what nobody wants trained would be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from .node_notes import NO_GRAD, set_note

_AROUND: ContextVar[bool] = ContextVar("shardwright_grad_mode", default=True)


class GradMode(TorchFunctionMode):
    """Writes what `no_grad` and its kin say into the metadata of the nodes that follow."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch._C._set_grad_enabled:
            set_note(NO_GRAD, not args[0])
        return result


@contextmanager
def called_with_gradients(on: bool) -> Iterator[None]:
    """Within this, captures are of a call that the user makes with gradients on or off."""
    token = _AROUND.set(on)
    try:
        yield
    finally:
        _AROUND.reset(token)


@contextmanager
def as_called(asks: bool) -> Iterator[None]:
    """Gradients as at the call of the model, if its forward reads the mode; else on, so that a program serves both."""
    with torch.set_grad_enabled(_AROUND.get()) if asks else nullcontext():
        yield


def grad_is_off(node: fx.Node, region: bool) -> bool:
    """Whether a node was traced without gradients; `region` is what the regions around it say."""
    return bool(node.meta.get(NO_GRAD, region))

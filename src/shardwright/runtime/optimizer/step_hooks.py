"""Hooks of a step, where that is not one call of the optimizer's own `step`, or not of it alone."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from torch.optim import Optimizer

from .gathered import Closure


def run_pre_hooks(optimizer: Optimizer, closure: Closure | None) -> Closure | None:
    """Run the hooks before a step; they may pass another closure."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        result = hook(optimizer, () if closure is None else (closure,), {})
        if result is not None:
            args, kwargs = result
            closure = kwargs.get("closure", args[0] if args else None)
    return closure


def run_post_hooks(optimizer: Optimizer) -> None:
    """Run the hooks after a step."""
    for hook in optimizer._optimizer_step_post_hooks.values():
        hook(optimizer, (), {})


@contextmanager
def without_hooks(optimizer: Optimizer) -> Iterator[None]:
    """Within this the optimizer's own `step` runs none of them."""
    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
    try:
        yield
    finally:
        optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = hooks

"""Steps of optimizers that declare themselves elementwise: on shards, and held to it.

A norm, a sum or a view of rows inside such a step would be that of this rank's shard, and no number would say so. All
tensors in it are shards or made of shards, so whatever is not elementwise is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from shardwright.errors import InputError

from ..parameters.local_ops import is_about_tensor, is_elementwise
from ..parameters.outside import as_anybody, as_model
from .gathered import Closure, Inner
from .step_hooks import run_post_hooks, run_pre_hooks, without_hooks

_VIEWS = frozenset("view reshape flatten unflatten squeeze unsqueeze ravel split".split())
_COUNTS = frozenset("numel nelement __len__".split())


def step_checked(optimizer: Optimizer, inner: Inner, closure: Closure | None) -> Any:
    """A step on shards, of which every op is looked at."""
    closure = run_pre_hooks(optimizer, closure)
    checking = _ElementwiseOnly(type(optimizer).__name__)
    with without_hooks(optimizer), as_model(), checking:
        result = inner() if closure is None else inner(checking.unchecked(closure))
    run_post_hooks(optimizer)
    return result


class _ElementwiseOnly(TorchFunctionMode):
    """Refuses functions that are not elementwise, of tensors that are no single numbers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._active = name, True

    def unchecked(self, closure: Closure) -> Closure:
        """A closure runs the model, which is no part of the update."""

        def run() -> Any:
            self._active = False
            try:
                with as_anybody():
                    return closure()
            finally:
                self._active = True

        return run

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(getattr(func, "__name__", ""))
        if self._active and not _is_allowed(name) and _has_shards((args, kwargs)):
            raise InputError(
                f"{self._name} is declared elementwise, and its step calls {name.strip('_')} of a tensor: that would "
                f'be of this rank\'s shard, not of the tensor. Set {self._name}.update_needs = "tensor" instead of '
                f"elementwise = True, and each tensor is updated in full by one rank"
            )
        return func(*args, **(kwargs or {}))


def _is_allowed(name: str) -> bool:
    if name.startswith("_foreach_"):
        return is_elementwise(name.removeprefix("_foreach_"))
    return (is_elementwise(name) or is_about_tensor(name) or name.strip("_") in _VIEWS) and name not in _COUNTS


def _has_shards(arguments: Any) -> bool:
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return any(isinstance(leaf, Tensor) and leaf.ndim > 0 for leaf in leaves)

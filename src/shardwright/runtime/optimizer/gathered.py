"""A step on gathered tensors: parameters, gradients and state are full on every rank, and sharded again afterwards.

`step_gathered` gathers everything at once, which is right for any optimizer. `owners.py` gathers less.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from ..parameters.full_tensors import coordinates, gather_tensor, shard_tensor, true_dtype
from ..parameters.sharded import ShardedParameter, Untouched

Inner = Callable[..., Any]
Closure = Callable[[], Any]


def step_gathered(optimizer: Optimizer, inner: Inner, closure: Closure | None) -> Any:
    with gathered_groups(optimizer, optimizer.param_groups) as shown:
        return inner() if closure is None else inner(_on_shards(optimizer, shown, closure))


@contextmanager
def gathered_groups(optimizer: Optimizer, groups: Sequence[dict[str, Any]]) -> Iterator[list[tuple[Any, Tensor]]]:
    """Within this the param groups hold whole parameters with whole gradients and state."""
    shown: list[tuple[Any, Tensor]] = []
    before = [list(group["params"]) for group in groups]
    for group in groups:
        full_parameters = [_gathered(leaf) for leaf in group["params"]]
        shown += zip(group["params"], full_parameters, strict=True)
        group["params"][:] = full_parameters
    for leaf, full in shown:
        if leaf in optimizer.state and leaf is not full:
            optimizer.state[full] = gather_state(optimizer.state.pop(leaf), leaf)
    try:
        yield shown
    finally:
        write_back(shown)
        for leaf, full in shown:
            if full in optimizer.state and leaf is not full:
                optimizer.state[leaf] = shard_state(optimizer.state.pop(full), leaf)
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
def write_back(shown: Sequence[tuple[Any, Tensor]]) -> None:
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
        write_back(shown)
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


def shard_state(state: dict[str, Any], leaf: Any) -> dict[str, Any]:
    """State as kept: what has the whole parameter's shape is cut as the parameter is, in a master's dtype."""
    if not isinstance(leaf, ShardedParameter) or not leaf.spec.shape:
        return state
    fits = {k for k, v in state.items() if isinstance(v, Tensor) and tuple(v.shape) == leaf.spec.shape}
    leaf.sharded_keys = frozenset(fits)
    return {key: _shard(_widened(value, leaf), leaf) if key in fits else value for key, value in state.items()}


def _widened(value: Tensor, leaf: ShardedParameter) -> Tensor:
    """State that was made beside a narrow parameter belongs to its master."""
    return value.to(true_dtype(leaf.spec)) if leaf.spec.master and value.is_floating_point() else value


def gather_state(state: dict[str, Any], leaf: Any) -> dict[str, Any]:
    """The inverse of `shard_state`. Names decide: by its shape a small factor might pass for a shard on some ranks."""
    if not isinstance(leaf, ShardedParameter) or leaf.groups is None or not leaf.spec.shape:
        return state
    names = leaf.sharded_keys
    if names is None:  # just loaded
        names = frozenset(k for k, v in state.items() if isinstance(v, Tensor) and v.shape == leaf.shape)
    return {k: gather_tensor(v, leaf.spec, leaf.groups, leaf.spread) if k in names else v for k, v in state.items()}

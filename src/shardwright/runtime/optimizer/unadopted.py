"""Optimizers that have parameters of a compiled model without `sw.parallelize` knowing: made or extended after it.

Their `step` sees shards as if they were parameters. That is right where an update of an element needs that element only
and the shards are what is trained. It is not where the update looks at a whole tensor or at all of them, or where ZeRO
or a master has the optimizer update something else. torch calls `check_unadopted` before every step of every optimizer.
"""

from __future__ import annotations

import functools
from typing import Any
from weakref import WeakKeyDictionary

from torch.optim import Optimizer
from torch.optim import optimizer as hooked

from shardwright.errors import InputError

from ..parameters.sharded import ShardedParameter
from .adopt import known_sight
from .state import is_adopted


@functools.cache
def watch_optimizers() -> None:
    """Look at optimizers from now on."""
    hooked.register_optimizer_step_pre_hook(check_unadopted)


_seen: WeakKeyDictionary[Optimizer, int] = WeakKeyDictionary()  # the param groups that were fine


def check_unadopted(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would be that of shards; an optimizer is looked at again when it has got another group."""
    if _seen.get(optimizer) == len(optimizer.param_groups):
        return
    shards = [
        leaf for group in optimizer.param_groups for leaf in group["params"] if isinstance(leaf, ShardedParameter)
    ]
    split = [shard for shard in shards if shard.shard is not None]
    if not split and (is_adopted(optimizer) or not shards or known_sight(optimizer) == "element"):
        _seen[optimizer] = len(optimizer.param_groups)
        return
    name = type(optimizer).__name__
    why = (
        f"{split[0].spec.name} is updated through a share or a master of it, which only parallelize can give to it"
        if split
        else "an update may need more than the same element, and the model's parameters are shards"
    )
    raise InputError(
        f"{name} has parameters of a compiled model that it did not have when it was passed to sw.parallelize: {why}. "
        f"Make it of the original's parameters, with all param groups, and pass it: optimizer = "
        f"{name}(model.parameters(), ...); model, optimizer = sw.parallelize(model, optimizer)"
    )

"""Optimizers that were made of a compiled model's parameters and not passed to `sw.parallelize`.

Their `step` sees pieces as if they were parameters. That is right where an update of an element needs that element only
and the pieces are what is trained. It is not where the update looks at a whole tensor or at all of them, or where ZeRO
or a master has the optimizer update something else. torch calls `look` before every step of every optimizer.
"""

from __future__ import annotations

import functools
from typing import Any

from torch.optim import Optimizer
from torch.optim import optimizer as hooked

from shardwright.errors import InputError

from .optimizer import known_sight
from .optimizer_state import is_adopted
from .parameters import ShardParameter


@functools.cache
def watch_optimizers() -> None:
    """Look at optimizers from now on."""
    hooked.register_optimizer_step_pre_hook(look)


def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Refuse a step that would be that of pieces."""
    if is_adopted(optimizer):
        return
    pieces = [leaf for group in optimizer.param_groups for leaf in group["params"] if isinstance(leaf, ShardParameter)]
    split = [piece for piece in pieces if piece.shard is not None]
    if not split and (not pieces or known_sight(optimizer) == "element"):
        return
    name = type(optimizer).__name__
    why = (
        f"{split[0].held.name} is updated through a share or a master of it, which only parallelize can give to it"
        if split
        else "an update may need more than the same element, and the model's parameters are pieces"
    )
    raise InputError(
        f"{name} was made of the parameters of a compiled model and not passed to sw.parallelize: {why}. Make it of "
        f"the original's parameters and pass it: optimizer = {name}(model.parameters(), ...); "
        "model, optimizer = sw.parallelize(model, optimizer)"
    )

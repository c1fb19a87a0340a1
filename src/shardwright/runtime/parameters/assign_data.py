"""Setting `.data` of a parameter, as swaps with EMA weights and `vector_to_parameters` do.

The parameter gets the memory that it is given, as on one device: who kept the old `.data` still has the old values.
Where the optimizer updates a share of it (ZeRO-1 and 2), the share follows. A full tensor is sharded like it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shardwright.storage import zero_axes

from .local_ops import ShardPlacement, refusal


def set_data(parameter: Any, value: Tensor, place: ShardPlacement | None, value_place: ShardPlacement | None) -> None:
    """Give a parameter other values. `place` is where it lies if it is a shard, `given` the same of the values."""
    if parameter.owner is not None and parameter.slot is not None:  # a share, which is a view on its parameter
        with torch.no_grad():
            parameter.detach().copy_(value)
        return
    other = place is not None and value.shape != parameter.shape
    if place is not None and other and value_place is None and tuple(value.shape) == place.spec.shape:
        value = place.shard(value).clone()
    elif place is not None and (other or value_place not in (None, place)):
        raise refusal("setting the data", place, parameter.shape)
    parameter.data = value
    if parameter.shard is not None and parameter.slot is not None:  # a view: `sharded` lets no other come here
        axes = zero_axes(parameter.spec, parameter.groups.mesh.sizes)
        parameter.shard.data = parameter.slot.owned(parameter.detach(), parameter.groups[axes].index)

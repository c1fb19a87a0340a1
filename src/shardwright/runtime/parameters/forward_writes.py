"""Parameters that forward itself writes to, such as a table whose rows are renormalized (`Embedding(max_norm=...)`)."""

from __future__ import annotations

import torch
from torch import Tensor

from shardwright.storage import zero_axes

from .full_tensors import coordinates
from .packing import make_slot
from .sharded import ShardedParameter, Untouched


@torch.no_grad()
def write_parameter(parameter: ShardedParameter, value: Tensor) -> None:
    """Give a parameter the value that ranks compute with from now on; where it is sharded, a rank keeps its share."""
    spec, groups = parameter.spec, parameter.groups
    axes = zero_axes(spec, groups.mesh.sizes) if groups is not None and spec.storage.shards_parameter else ()
    with Untouched():
        if groups is not None and axes:
            slot = make_slot(spec, axes, groups.mesh.sizes, coordinates(groups))
            value = slot.owned(value, groups[axes].index)
        parameter.copy_(value)

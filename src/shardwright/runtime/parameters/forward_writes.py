"""Parameters that forward itself writes to, such as a table whose rows are renormalized (`Embedding(max_norm=...)`)."""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import make_slot
from .sharded import ShardedParameter, Untouched
from .spec import coordinates, zero_axes


@torch.no_grad()
def write_parameter(parameter: ShardedParameter, value: Tensor) -> None:
    """Give a parameter the value that ranks compute with from now on; under ZeRO-3 a rank keeps its share of it."""
    spec, groups = parameter.spec, parameter.groups
    axes = zero_axes(spec, groups.mesh.sizes) if groups is not None and spec.level == 3 else ()
    with Untouched():
        if groups is not None and axes:
            slot = make_slot(spec, axes, groups.mesh.sizes, coordinates(groups))
            value = slot.owned(value, groups[axes].index)
        parameter.copy_(value)

"""What a loss scaler finds in one rank's shard of a gradient, all ranks have found.

`torch.amp.GradScaler` divides gradients by its scale and notes whether one is not finite, in one call for all of a
dtype. Ranks hold different shards, and must all skip the step of their optimizers, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from shardwright.storage import sharding_axes

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..world import Groups

UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


@report_failure
def unscale(gradients: Sequence[Tensor], found_inf: Tensor, inverse: Tensor) -> None:
    """Divide, and make ranks agree on what was found. The ranks of a mesh call it in one order.

    Between stages of a pipeline, which may hold other dtypes, `pipeline.nonfinite` has made them agree before.
    """
    UNSCALE(list(gradients), found_inf, inverse)
    axes: dict[tuple[Groups, str], None] = {}
    for gradient in gradients:
        groups: Groups | None = getattr(gradient, "groups", None)
        if groups is not None:
            sharding = sharding_axes(gradient.spread, groups.mesh)  # type: ignore[attr-defined]
            axes |= {(groups, name): None for name in sharding}
    for groups, name in sorted(axes, key=lambda axis: axis[0].mesh.names.index(axis[1])):
        flight_recorder.enter("all_reduce", groups[name].process_group, "what a scaler found")
        process_group.all_reduce(found_inf, groups[name].process_group, "max").wait()

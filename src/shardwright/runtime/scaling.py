"""What a loss scaler finds in one rank's piece of a gradient, all ranks have found.

`torch.amp.GradScaler` divides gradients by its scale and notes whether one is not finite, in one call for all of a
dtype. Ranks hold different pieces, and must all skip the step of their optimizers, or none.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import journal, nearby
from .faults import told
from .holding import cutting_axes
from .world import Groups

UNSCALE = torch._amp_foreach_non_finite_check_and_unscale_


@told
def unscale(gradients: Sequence[Tensor], found: Tensor, inverse: Tensor) -> None:
    """Divide, and make ranks agree on what was found. The ranks of a mesh call it in one order.

    Between stages of a pipeline, which may hold other dtypes, `pipeline.nonfinite` has made them agree before.
    """
    UNSCALE(list(gradients), found, inverse)
    axes: dict[tuple[Groups, str], None] = {}
    for gradient in gradients:
        groups: Groups | None = getattr(gradient, "groups", None)
        if groups is not None:
            cut = cutting_axes(gradient.spread, groups.mesh)  # type: ignore[attr-defined]
            axes |= {(groups, name): None for name in cut}
    for groups, name in sorted(axes, key=lambda held: held[0].mesh.names.index(held[1])):
        journal.enter("all_reduce", groups[name].process_group, "what a scaler found")
        nearby.all_reduce(found, groups[name].process_group, "max").wait()

"""Make a non-finite gradient of one stage visible on all.

A loss scaler checks the gradients of a rank and skips the step of its optimizer if one is not
finite. Ranks of a pipeline have different gradients, and must all skip, or none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from ..collectives import process_group
from ..faults import flight_recorder
from ..faults.watch import report_failure
from ..optimizer.adopt import leaf_of
from ..parameters.sharded import ShardedParameter, Untouched


@report_failure
@torch.no_grad()
def show_everywhere(parameters: Sequence[ShardedParameter], device: torch.device) -> None:
    """Put an infinity into every gradient if any rank has a non-finite one. All ranks must call it."""
    gradients = gradients_of(parameters)
    with Untouched():
        lost = (~are_finite(gradients)).float() if gradients else torch.zeros((), device=device)
        if dist.is_initialized() and dist.get_world_size() > 1:
            flight_recorder.enter("all_reduce", None, "whether gradients are finite")
            process_group.all_reduce(lost, None, "max").wait()
        if lost.item():
            for gradient in gradients:
                gradient[(0,) * gradient.ndim] = math.inf


def gradients_of(parameters: Iterable[Tensor]) -> list[Tensor]:
    """The gradients that an optimizer sees: under ZeRO, those of shards."""
    return [gradient for p in parameters if (gradient := leaf_of(p).grad) is not None and gradient.numel()]


def are_finite(gradients: list[Tensor]) -> Tensor:
    """Whether this rank's shards of some gradients are all finite."""
    with Untouched():
        largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, math.inf)])
        return torch.isfinite(largest).all()

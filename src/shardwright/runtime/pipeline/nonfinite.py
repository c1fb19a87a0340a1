"""A gradient that is not finite on one stage is made to show on all.

A loss scaler looks at the gradients that a rank has, and skips the step of its optimizer if
one is not finite. Ranks of a pipeline have different gradients, and must all skip, or none.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import journal, nearby
from ..faults import told
from ..optimizer import leaf_of
from ..parameters import ShardParameter, Untouched


@told
@torch.no_grad()
def show_everywhere(parameters: Sequence[ShardParameter], device: torch.device) -> None:
    """Put an infinity into every gradient if any rank has one that is not finite. All ranks must call it."""
    gradients = [gradient for p in parameters if (gradient := _gradient(p)) is not None and gradient.numel()]
    with Untouched():
        lost = torch.zeros((), device=device)
        if gradients:
            largest = torch.stack([norm.float() for norm in torch._foreach_norm(gradients, math.inf)])
            lost = (~torch.isfinite(largest).all()).float()
        if dist.is_initialized() and dist.get_world_size() > 1:
            journal.enter("all_reduce", None, "whether gradients are finite")
            nearby.all_reduce(lost, None, "max").wait()
        if lost.item():
            for gradient in gradients:
                gradient[(0,) * gradient.ndim] = math.inf


def _gradient(parameter: ShardParameter) -> Tensor | None:
    """The gradient that the optimizer sees: of the share of a parameter under ZeRO."""
    return leaf_of(parameter).grad

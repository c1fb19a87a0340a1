"""A loss scaler that decides the same on all ranks.

A scaler looks at the gradients of its own rank and skips the step if one is not finite. Ranks have
different pieces, and all must skip, or none.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


def agree(scaler: torch.amp.GradScaler) -> None:
    """Have a scaler see what is not finite on any rank. May be called again."""
    if "_unscale_grads_" in vars(scaler):
        return
    inner = scaler._unscale_grads_

    def unscale(*args: Any, **kwargs: Any) -> dict[torch.device, Tensor]:
        found: dict[torch.device, Tensor] = inner(*args, **kwargs)
        for lost in found.values() if dist.is_initialized() else ():
            dist.all_reduce(lost, dist.ReduceOp.MAX)
        return found

    scaler._unscale_grads_ = unscale  # type: ignore[method-assign]

"""Loss scaling for float16, whose small gradients would underflow.

A non-finite gradient on any rank of any stage makes all ranks skip the update and halve the scale; after enough updates
without one it is doubled. torch.amp.GradScaler works with a compiled model too; this one also covers ranks whose stage
has no parameters.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from ..precision import Precision
from .agreement import Agreement

LARGEST = 2.0**24


class LossScale:
    """The loss scale of a run, equal on all ranks."""

    def __init__(self, start: float = 2.0**16, patience: int = 2000) -> None:
        self.scale, self.patience = start, patience
        self.good = 0  # updates since the scale was changed
        self.skipped = 0

    def up(self, loss: Tensor) -> Tensor:
        return loss * self.scale

    @torch.no_grad()
    def down(self, optimizer: Optimizer, agreement: Agreement) -> bool:
        """Unscale the gradients; returns whether they are finite on all ranks."""
        gradients = [leaf.grad for group in optimizer.param_groups for leaf in group["params"] if leaf.grad is not None]
        with torch._C.DisableTorchFunctionSubclass():  # local shards: ranks agree once, below
            largest: list[Tensor] = []
            for tensors in _alike(gradients):
                torch._foreach_mul_(tensors, 1.0 / self.scale)
                largest += [norm.double() for norm in torch._foreach_norm(tensors, math.inf)]
        broken = bool(largest) and not bool(torch.stack(largest).isfinite().all())
        return agreement.largest(float(broken)) == 0.0

    def move(self, finite: bool) -> None:
        """Adapt the scale after an update or a skipped one."""
        self.good += 1
        if not finite:
            self.scale, self.good, self.skipped = self.scale / 2, 0, self.skipped + 1
        elif self.good >= self.patience:
            self.scale, self.good = min(self.scale * 2, LARGEST), 0

    def state_dict(self) -> dict[str, Any]:
        return {"scale": self.scale, "good": self.good, "skipped": self.skipped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.scale, self.good, self.skipped = state["scale"], state["good"], state["skipped"]


def _alike(gradients: Sequence[Tensor]) -> list[list[Tensor]]:
    """Non-empty gradients grouped by dtype."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for gradient in gradients:
        if gradient.numel():
            by_dtype.setdefault(gradient.dtype, []).append(gradient)
    return list(by_dtype.values())


def scale_for(precision: Precision, start: float) -> LossScale | None:
    """A loss scale, if anything is computed in float16."""
    return LossScale(start) if "float16" in (precision.compute, precision.parameters) else None

"""Stands for a package of somebody else's: its functions are registered by their path."""

from __future__ import annotations

import torch
from torch import Tensor


def standardized(x: Tensor, eps: float = 1e-5) -> Tensor:
    """Refuses to be traced: it looks at values."""
    if not bool(torch.isfinite(x).all()):
        raise ValueError("not finite")
    return (x - x.mean(-1, keepdim=True)) / (x.std(-1, keepdim=True) + eps)

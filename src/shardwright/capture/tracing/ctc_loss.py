"""The CTC loss, which can't be traced: how large its tables are depends on the lengths that it is given.

It stays one op, which gives a loss for each sample. What `reduction` makes of these is written out, so that samples
can be split.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..user_calls.callee import Callee
from ..user_calls.kept import current, mark


def ctc_losses(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int, zero_infinity: bool
) -> Tensor:
    """The loss of each sample."""
    return F.ctc_loss(log_probs, targets, input_lengths, target_lengths, blank, "none", zero_infinity)


def _shape(log_probs: Tensor) -> tuple[int, ...]:
    return tuple(log_probs.shape[1:2]) if log_probs.dim() == 3 else ()


_CALLEE = Callee(ctc_losses, f"{__name__}.ctc_losses", describe=lambda log_probs, *_: _shape(log_probs))


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Any, target_lengths: Any, blank: int = 0,
    reduction: str | int = "mean", zero_infinity: bool = False,
) -> Tensor | None:  # fmt: skip
    """`F.ctc_loss` while a model is traced; None where it is as it is."""
    user_calls = current()
    if user_calls is None:
        return None
    lengths = [
        length if isinstance(length, Tensor) else torch.tensor(list(length), dtype=torch.long)
        for length in (input_lengths, target_lengths)
    ]
    losses: Tensor = mark(user_calls, _CALLEE, [log_probs, targets, *lengths, blank, zero_infinity])
    if reduction in ("none", 0):
        return losses
    if reduction in ("sum", 2):
        return losses.sum()
    return (losses / lengths[1].to(losses.dtype).clamp_min(1)).mean()

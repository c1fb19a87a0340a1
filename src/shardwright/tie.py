"""What was made, tied to what it may have been made of, be it with a gradient of zero.

Where data decides what is computed, ranks may not differ in what has a gradient: one of them would wait in
backward for a sum that the others never begin. A graph run op by op (`capture`) and a compiled program
(`runtime`) both need it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def tied(made: Sequence[Tensor], operands: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The same values; those that float depend on every operand that needs a gradient."""
    wanting = [held for held in operands if held.requires_grad]
    floats = [at for at, held in enumerate(made) if held.is_floating_point()]
    if not wanting or not floats or not torch.is_grad_enabled():
        return tuple(made)
    found = _Tie.apply(len(floats), *(made[at] for at in floats), *wanting)  # type: ignore[no-untyped-call]
    known = dict(zip(floats, found, strict=True))
    return tuple(known.get(at, held) for at, held in enumerate(made))


class _Tie(torch.autograd.Function):
    """The first tensors as they are; the others get zeros for a gradient."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.shapes = [(tensor.shape, tensor.dtype, tensor.device) for tensor in tensors[count:]]
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        zeros = (torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.shapes)
        return None, *gradients, *zeros

"""`torch.bincount` with a size that is known: routers of experts count tokens with it.

Its result is as long as the largest number, which no trace can know. With `minlength` the caller sets how long
it will be; inside `counting` that is the length, and a larger number is an error when the program runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ..user_calls.kept import KeptCalls, current


@contextmanager
def traceable_bincount(user_calls: KeptCalls) -> Iterator[None]:
    """For the length of a trace, counts of a known length are sums into that many places."""
    original = torch.bincount
    method = torch.Tensor.bincount

    def bincount(input: Tensor, weights: Tensor | None = None, minlength: int = 0) -> Tensor:
        if current() is not user_calls or not minlength:
            return original(input, weights, minlength)
        added = torch.ones_like(input, dtype=torch.long) if weights is None else weights
        return torch.zeros(minlength, dtype=added.dtype, device=input.device).scatter_add(0, input.long(), added)

    patched: Any = torch
    try:
        patched.bincount, patched.Tensor.bincount = bincount, bincount
        yield
    finally:
        patched.bincount, patched.Tensor.bincount = original, method

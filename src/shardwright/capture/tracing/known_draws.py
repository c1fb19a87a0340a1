"""Draws whose outcome is known before they are made.

A layer that may be skipped is written `if torch.rand([]) < self.layerdrop: continue`, also
where layerdrop is 0. A graph has no number to compare, but none is needed: what `torch.rand`
draws is never below 0 and always below 1.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# What a comparison of a draw with a number comes to, where it is the same for every draw in [0, 1).
_LESS = {True: lambda number: number >= 1, False: lambda number: number <= 0}
_MORE = {True: lambda number: number < 0, False: lambda number: number >= 1}
_COMPARISONS: dict[str, dict[bool, Callable[[float], bool]]] = {
    "lt": _LESS,
    "le": {True: lambda number: number >= 1, False: lambda number: number < 0},
    "gt": _MORE,
    "ge": {True: lambda number: number <= 0, False: lambda number: number >= 1},
}


class KnownDraws(TorchFunctionMode):
    """Within this, comparing a scalar draw with a number that it can't reach gives a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.drawn: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **(kwargs or {}))
        known = _COMPARISONS.get(getattr(func, "__name__", "").strip("_"))
        if known is not None and len(args) == 2 and self._is_draw(args[0]) and isinstance(args[1], int | float):
            for outcome, holds in known.items():
                if holds(args[1]):
                    return torch.tensor(outcome, device=args[0].device)
        result = func(*args, **(kwargs or {}))
        if func is torch.rand and result.dim() == 0:
            self.drawn.add(result)
        return result

    def _is_draw(self, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and any(value is draw for draw in self.drawn)

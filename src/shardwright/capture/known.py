"""Values that are known while a model is traced, since they depend on no input and no parameter.

A mask of ones that a model makes for itself has values, and so has what follows from it alone.
Where the model then asks (`if mask.all()`, `shapes.tolist()`), the answer is the same at every
call. Beside the trace such tensors are computed for real; a number that is taken out of one is
that number. What is written in place is forgotten, and with it all the rest, since views share.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

_MAKERS = frozenset({"ones", "zeros", "full", "arange", "eye", "linspace"})
_LIKE = frozenset({"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"})
_ABOUT = _MAKERS | _LIKE  # what is made says more than what it is made of
_QUESTIONS = frozenset({"item", "tolist", "__bool__", "__int__", "__float__", "__index__"})
_DRAWS = re.compile(r"rand|bernoulli|normal|uniform|multinomial|poisson|dropout|empty")
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LARGEST = 1 << 20  # elements; a table of such a size is no number that a model branches on


class KnownValues(TorchFunctionMode):
    """Within this, tensors that depend on nothing answer questions about their values."""

    def __init__(self) -> None:
        super().__init__()
        self.known: Any = WeakIdKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _ABOUT and args and isinstance(args[0], torch.Tensor) and args[0] not in self.known:
            if self.known and _writes(name, kwargs):
                self.known.clear()
            return func(*args, **kwargs)  # nearly all calls: nothing can be known of what comes out
        given = [held for held in pytree.tree_leaves((args, kwargs)) if isinstance(held, torch.Tensor)]
        if name in _QUESTIONS and given and given[0] in self.known:
            return getattr(self.known[given[0]], name)()
        if name in _MAKERS or name in _LIKE:  # arange(height), where height is a tensor
            like = args[:1] if name in _LIKE else ()
            rest, kwargs = pytree.tree_map(self._number, (args[len(like) :], kwargs))
            args = (*like, *rest)
        found = func(*args, **kwargs)
        if _writes(name, kwargs):
            self.known.clear()
        elif all(held in self.known for held in (given[1:] if name in _LIKE else given)):
            self._remember(func, name, args, kwargs, found)
        return found

    def _remember(self, func: Any, name: str, args: Any, kwargs: Any, found: Any) -> None:
        made = [held for held in pytree.tree_leaves(found) if isinstance(held, torch.Tensor)]
        if not made or _DRAWS.search(name) or any(held.numel() > _LARGEST or held.requires_grad for held in made):
            return
        with _disable_current_modes(), torch.no_grad():
            real = pytree.tree_map(self._real, (args, kwargs))
            if any(isinstance(held, _SYMBOLS) for held in pytree.tree_leaves(real)):
                return
            values = [held for held in pytree.tree_leaves(func(*real[0], **real[1])) if isinstance(held, torch.Tensor)]
        self.known.update(dict(_pairs(made, values)))

    def _number(self, held: Any) -> Any:
        single = isinstance(held, torch.Tensor) and held.dim() == 0 and held in self.known
        return self.known[held].item() if single else held

    def _real(self, held: Any) -> Any:
        """A known tensor as its values; a like-tensor needs only a shape; everything is on the CPU."""
        if isinstance(held, torch.Tensor):
            return self.known[held] if held in self.known else torch.empty((), dtype=held.dtype).expand(held.shape)
        return torch.device("cpu") if isinstance(held, torch.device) else held


def _writes(name: str, kwargs: Any) -> bool:
    inside = name.endswith("_") and not name.endswith("__")
    return inside or name in ("__setitem__", "data") or re.fullmatch(r"__i\w+__", name) is not None or "out" in kwargs


def _pairs(made: list[torch.Tensor], values: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for held, value in zip(made, values, strict=True):
        if held.shape == value.shape and held.dtype == value.dtype:
            yield held, value

"""Autocast made explicit: the casts that a region makes on the way into each op.

Which inputs an op casts depends on the op and on dtypes alone, so each combination is
tried once, on fakes, with a mode that sits below autocast and sees the casts. Where an op
casts only deeper inside (einsum), no explicit cast can be written: it stays in its region.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Casts = dict[int, torch.dtype]  # number of the tensor input -> what it is cast to


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which of the given tensors are cast, and to what."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self.casts: Casts = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and id(args[0]) in self.numbers and kwargs.get("dtype"):
            self.casts[self.numbers[id(args[0])]] = kwargs["dtype"]
        return func(*args, **kwargs)


class Autocast:
    """The casts of an autocast region such as "cpu:bfloat16"."""

    def __init__(self) -> None:
        self._known: dict[Any, Casts | None] = {}

    def casts(self, region: str, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Casts | None:
        """The casts that an op makes of its tensors, or None if they can't be made explicit."""
        tensors = [leaf for leaf in pytree.tree_leaves((args, dict(kwargs))) if isinstance(leaf, torch.Tensor)]
        key = (region, op, tuple(tensor.dtype for tensor in tensors))
        if key not in self._known:
            self._known[key] = self._probe(region, op, args, kwargs)
        return self._known[key]

    def _probe(self, region: str, op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Casts | None:
        device, dtype = region.split(":")
        mode = FakeTensorMode()
        fresh: dict[int, torch.Tensor] = {}

        def copy(tensor: torch.Tensor) -> torch.Tensor:
            with mode:
                return fresh.setdefault(len(fresh), torch.empty(tensor.shape, dtype=tensor.dtype))

        fakes, named = pytree.tree_map_only(torch.Tensor, copy, (tuple(args), dict(kwargs)))
        watch = _Watch(list(fresh.values()))
        with torch.no_grad(), mode, torch.autocast(device, getattr(torch, dtype)), watch:
            under = op(*fakes, **named)
        numbers = iter(range(len(fresh)))

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return torch.empty(tensor.shape, dtype=watch.casts.get(next(numbers), tensor.dtype), device="meta")

        with torch.no_grad():
            try:
                cast_args, cast_kwargs = pytree.tree_map_only(torch.Tensor, cast, (fakes, named))
                explicit = op(*cast_args, **cast_kwargs)
            except RuntimeError:  # dtypes that don't fit without the region
                return None
        return watch.casts if _dtypes(under) == _dtypes(explicit) else None


def _dtypes(result: Any) -> list[torch.dtype]:
    return [leaf.dtype for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]

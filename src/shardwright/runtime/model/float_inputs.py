"""Floats among the arguments of a call: constants at first, inputs from the second value on.

A program for every temperature or weight of a loss would be compiled again and again. So at the second value an
argument is tried as a tensor without dims. If the graph is the same but for that (compile/scalars.py), it is an input
from then on. If it is not, since the number decides something, it stays a constant with a program for each value.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from shardwright.errors import CaptureError

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class NotAnInput(CaptureError):
    """A float can't be an input of a program."""


class FloatInputs:
    """Which floats are inputs, by the method, the structure of its arguments and the place among them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: dict[tuple[str, str, int], str] = {}  # the value that it had first
        self._inputs: dict[tuple[str, str, int], bool] = {}  # whether it is an input, once that was tried

    def lift(self, call: Arguments, method: str, dtype: torch.dtype | None) -> tuple[Arguments, Mapping[int, float]]:
        """A call with tensors in the place of floats that are inputs or might be, and what those floats are."""
        leaves, spec = pytree.tree_flatten(call)
        floats: dict[int, float] = {}
        for index, leaf in enumerate(leaves):
            if type(leaf) is float and dtype is not None:
                key = (method, str(spec), index)
                changed = self._first.setdefault(key, repr(leaf)) != repr(leaf)
                if self._inputs.get(key, changed):
                    floats[index] = leaf
        if not floats:
            return call, floats
        tensors = {at: torch.tensor(leaf, dtype=dtype, device=self._device) for at, leaf in floats.items()}
        lifted = [tensors.get(at, leaf) for at, leaf in enumerate(leaves)]
        return pytree.tree_unflatten(lifted, spec), floats

    def decide(self, call: Arguments, method: str, floats: Iterable[int], inputs: bool) -> None:
        """Remember whether some floats are inputs."""
        spec = str(pytree.tree_structure(call))
        self._inputs.update({(method, spec, index): inputs for index in floats})


def dtype_of_floats(tensors: Iterable[Tensor]) -> torch.dtype | None:
    """The dtype for floats of a model: that of all its parameters, if numbers are exact enough in it."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    single = dtypes.pop() if len(dtypes) == 1 else None
    return single if single in (torch.float32, torch.float64) else None

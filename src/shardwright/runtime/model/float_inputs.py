"""Float arguments of a call: constants at first, inputs from the second value on.

One program per temperature or loss weight would mean constant recompilation. So at the second value an argument
is tried as a 0-dim tensor. If the graph is otherwise the same (compile/scalars.py), it is an input from then on. If
not, since control flow depends on the number, it stays a constant with a program for each value.
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
    """Which floats are inputs, by method, structure of the arguments and position in them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first: dict[tuple[str, str, int], str] = {}  # its first value
        self._inputs: dict[tuple[str, str, int], bool] = {}  # whether it is an input, once tried

    def lift(self, call: Arguments, method: str, dtype: torch.dtype | None) -> tuple[Arguments, Mapping[int, float]]:
        """A call with tensors instead of floats that are or may be inputs, and these floats."""
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
    """The dtype for floats of a model: that of all its parameters, if it is precise enough."""
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    single = dtypes.pop() if len(dtypes) == 1 else None
    return single if single in (torch.float32, torch.float64) else None

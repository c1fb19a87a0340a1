"""What a forward leaves behind in the attributes of its modules, and whether its next call reads it.

A program does the same at every call. A forward that caches a mask, or stores a loss for somebody to read, does so
too; one that continues from the hidden state of its last call, or counts its calls and scales by the count, does not.
They are distinguished by tracing once more, with the attributes as the first call has left them: what is read the next
time shows in the graph. What is known (constant_values.py) may be read, since it would only be made again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from .constant_values import ConstantValues

Attributes = dict[tuple[str, str], Any]
"""Values by the path of a module and the name of an attribute."""

_STANDARD = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, type(None))


def attributes(module: nn.Module) -> Attributes:
    """The numbers and tensors in attributes that are neither parameters, buffers nor submodules."""
    values: Attributes = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name not in _STANDARD and name != "_flat_weights" and _is_state(value):  # parameters, in a list
                values[path, name] = pytree.tree_map(lambda leaf: leaf, value)  # a list is a list of its own
    return values


def _is_state(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return all(isinstance(leaf, (Tensor, *_PLAIN)) and not isinstance(leaf, nn.Parameter) for leaf in leaves)


def left_behind(before: Attributes, after: Attributes, known: ConstantValues) -> Attributes:
    """What a call has changed, with tensors that have a shape only; without what is known."""
    changed: Attributes = {}
    for key, value in after.items():
        if key in before and _same(before[key], value):
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if not tensors or not all(known.knows(leaf) for leaf in tensors):
            changed[key] = pytree.tree_map_only(Tensor, _without_values, value)
    return changed


def _without_values(x: Tensor) -> Tensor:
    with _disable_current_modes():  # it is no part of the trace
        return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")


def _same(first: Any, other: Any) -> bool:
    (mine, spec), (theirs, others) = pytree.tree_flatten(first), pytree.tree_flatten(other)
    return spec == others and all(
        a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b) for a, b in zip(mine, theirs, strict=True)
    )


@contextmanager
def with_attributes(module: nn.Module, values: Attributes) -> Iterator[None]:
    """Within this the modules have other attributes."""
    missing = object()
    undo = []
    try:
        for (path, name), value in values.items():
            slots = vars(module.get_submodule(path))
            undo.append((slots, name, slots.get(name, missing)))
            slots[name] = value
        yield
    finally:
        for slots, name, value in undo:
            if value is missing:
                slots.pop(name, None)
            else:
                slots[name] = value


def carried(module: nn.Module, names: Sequence[tuple[str, str]]) -> CaptureError:
    """The refusal of a forward whose next call reads what this one has left behind."""
    shown = ", ".join(f"self.{path}.{name}".replace("..", ".") for path, name in names)
    return CaptureError(
        f"the forward of {type(module).__name__} changes {shown}, and its next call reads it; a program does the same "
        "at every call. Pass it in and return it, or make it a buffer (register_buffer) and write to it in place.",
        path=names[0][0],
    )

"""What a forward leaves behind in the attributes of its modules, and whether its next call reads it.

A program does the same at every call. A forward that caches a mask, or stores a loss for somebody to read, does so
too; one that continues from the hidden state of its last call, or counts its calls and scales by the count, does not.
They are distinguished by tracing once more, with the attributes as the first call has left them: what is read the next
time shows in the graph. What is known (constant_values.py) may be read, since it would only be made again.

A container or an object that the second call changes in place as well (a list that is appended to, a counter in a
dict, a meter) changes at every call, and whoever holds it waits for that in vain: such a forward is refused. A table
that is filled once is not.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from ...errors import CaptureError
from ...frozen_values import freeze, inner_of
from .constant_values import ConstantValues

Attributes = dict[tuple[str, str], Any]
"""Values by the path of a module and the name of an attribute."""


@dataclass(frozen=True, slots=True)
class ObjectState:
    """An object, or a container of more than numbers and tensors, and what was in it."""

    value: Any
    frozen: Hashable
    alive: dict[int, Any]  # what is known by its id


_STANDARD = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, type(None))


def attributes(module: nn.Module) -> Attributes:
    """What is in attributes that are neither parameters, buffers nor submodules."""
    values: Attributes = {}
    shared: dict[int, ObjectState] = {}  # a config that all modules have
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _STANDARD or name == "_flat_weights":  # parameters, in a list
                continue
            if _is_state(value):
                values[path, name] = pytree.tree_map(lambda leaf: leaf, value)  # a list is a list of its own
            elif inner_of(value) and not type(value).__module__.startswith("shardwright."):
                if id(value) not in shared:
                    alive: dict[int, Any] = {}
                    shared[id(value)] = ObjectState(value, freeze(value, alive), alive)
                values[path, name] = shared[id(value)]
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
        if isinstance(value, ObjectState):
            changed[key] = value.value
            continue
        tensors = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]
        if not tensors or not all(known.knows(leaf) for leaf in tensors):
            changed[key] = pytree.tree_map_only(Tensor, _without_values, value)
    return changed


def _without_values(x: Tensor) -> Tensor:
    with _disable_current_modes():  # it is no part of the trace
        return torch.empty(tuple(x.shape), dtype=x.dtype, device="meta")


def _same(first: Any, other: Any) -> bool:
    if isinstance(first, ObjectState) or isinstance(other, ObjectState):
        return isinstance(first, ObjectState) and isinstance(other, ObjectState) and first.frozen == other.frozen
    (mine, spec), (theirs, others) = pytree.tree_flatten(first), pytree.tree_flatten(other)
    return spec == others and all(
        a is b or (isinstance(a, _PLAIN) and type(a) is type(b) and a == b) for a, b in zip(mine, theirs, strict=True)
    )


class ChangedAgain:
    """The containers and objects among what a call has changed, to see whether the next call changes them in place."""

    def __init__(self, changed: Attributes) -> None:
        self._alive: dict[int, Any] = {}
        self._marks = {key: (value, freeze(value, self._alive)) for key, value in changed.items() if inner_of(value)}

    def keys(self) -> list[tuple[str, str]]:
        return [key for key, (value, frozen) in self._marks.items() if freeze(value, self._alive) != frozen]


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


def changed_in_place(module: nn.Module, names: Sequence[tuple[str, str]]) -> CaptureError:
    """The refusal of a forward that changes a container or an object at every call."""
    return CaptureError(
        f"the forward of {type(module).__name__} changes what is in {_shown(names)} at every call, which a program "
        "does not. Return what it puts there from forward, or do it outside of the model.",
        path=names[0][0],
    )


def _shown(names: Sequence[tuple[str, str]]) -> str:
    return ", ".join(f"self.{path}.{name}".replace("..", ".") for path, name in names)


def carried(module: nn.Module, names: Sequence[tuple[str, str]]) -> CaptureError:
    """The refusal of a forward whose next call reads what this one has left behind."""
    return CaptureError(
        f"the forward of {type(module).__name__} changes {_shown(names)}, and its next call reads it; a program does "
        "the same at every call. Pass it in and return it, or make it a buffer (register_buffer) and write to it in "
        "place.",
        path=names[0][0],
    )

"""Settings in comparable form: by content, else by identity.

    freeze       a number, a container or a config as a hashable value
    Contents     everything inside of some values, for a fast comparison

A container is compared by its items, an object (a config, a namespace) by its attributes and slots, a tensor by
identity and version, a small numpy array by its bytes. Everything else (a function, a module, a handle) is compared by
identity.
"""

from __future__ import annotations

import operator
import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "no such attribute"})()
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LARGEST = 20_000  # a larger container is data, not a setting
_LARGEST_ARRAY = 1 << 16  # bytes of it
_IDENTITY = (nn.Module, Tensor, type, type(sys), torch.dtype, torch.device)
_RECORDS = frozenset({"types", "argparse", "collections", "enum"})  # of the standard library: its objects hold settings


def freeze(value: Any, alive: dict[int, Any], seen: dict[int, int] | None = None) -> Hashable:
    """A value in comparable, hashable form. `alive` keeps objects that are compared by id.

    Repeated objects are referred to by first occurrence. Very large containers are not expanded.
    """
    kind = type(value)
    if kind in _VALUES:
        return (kind.__name__, repr(value))
    seen = {} if seen is None else seen
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if is_small_array(value):
        return ("array", str(value.dtype), value.shape, value.tobytes())
    if isinstance(value, ContextVar):
        return ("context", id(value), freeze(value.get(ABSENT), alive, seen))
    parts = [part for part in inner_of(value) if len(part) < _LARGEST and len(seen) < _LARGEST]
    if parts:
        return (kind, *(_freeze_items(part, alive, seen) for part in parts))
    alive[id(value)] = value
    return ("is", id(value), value._version if isinstance(value, Tensor) else 0)


def _freeze_items(inner: Any, alive: dict[int, Any], seen: dict[int, int]) -> Hashable:
    if isinstance(inner, dict):
        return tuple((freeze(key, alive, seen), freeze(item, alive, seen)) for key, item in inner.items())
    order = sorted(inner, key=repr) if isinstance(inner, set | frozenset) else inner
    return tuple(freeze(item, alive, seen) for item in order)


def inner_of(value: Any) -> list[Any]:
    """The containers that a value consists of: itself, its attributes, its slots."""
    parts: list[Any] = [value] if isinstance(value, _CONTAINERS) else []
    if is_record(value):
        attributes = getattr(value, "__dict__", None)
        if attributes is not None and (attributes or not parts):
            parts.append(attributes)
        slots = slots_of(value)
        if slots:
            parts.append({name: getattr(value, name) for name in slots if hasattr(value, name)})
    return parts


def is_record(value: Any) -> bool:
    """Whether an object is only its attributes, such as a config."""
    if isinstance(value, _IDENTITY) or not (hasattr(value, "__dict__") or slots_of(value)):
        return False
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if callable(value):  # an activation object with settings, but no function, kernel or library object
        return package not in ("torch", "triton", "builtins") and package not in sys.stdlib_module_names
    return package not in sys.stdlib_module_names or package in _RECORDS


def slots_of(value: Any) -> tuple[str, ...]:
    """The names of an object's slots."""
    names: list[str] = []
    for base in type(value).__mro__[:-1]:
        slots = base.__dict__.get("__slots__", ())
        names += [slots] if isinstance(slots, str) else slots
    return tuple(name for name in names if not name.startswith("__"))


def is_small_array(value: Any) -> bool:
    return type(value).__module__ == "numpy" and hasattr(value, "tobytes") and value.nbytes <= _LARGEST_ARRAY


class Contents:
    """A snapshot of everything mutable inside of some values."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._looks: list[tuple[Callable[[], list[Any]], list[Any]]] = []
        self._arrays: list[tuple[Any, bytes]] = []
        self._seen: dict[int, Any] = {}
        todo = list(values)
        while todo and len(self._seen) < _LARGEST:
            value = todo.pop()
            if type(value) in _VALUES or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            todo += self._add(value)

    def same(self) -> bool:
        """Whether nothing has changed."""
        return all(_same(look(), before) for look, before in self._looks) and all(
            array.tobytes() == before for array, before in self._arrays
        )

    def _add(self, value: Any) -> list[Any]:
        """Record a value; returns its items."""
        if isinstance(value, Tensor):
            self._look(lambda: [value._version])
        elif isinstance(value, ContextVar):
            self._look(lambda: [value.get(ABSENT)])
            return [value.get(ABSENT)]
        elif is_small_array(value):
            self._arrays.append((value, value.tobytes()))
        else:
            slots = slots_of(value) if is_record(value) else ()
            if slots:
                self._look(lambda: [getattr(value, name, ABSENT) for name in slots])
            parts = [part for part in inner_of(value) if len(part) < _LARGEST]
            for part in parts[: len(parts) - bool(slots)]:
                if not isinstance(part, tuple | frozenset):
                    self._look(partial(_items, part))
            return [item for part in parts for item in (part.values() if isinstance(part, dict) else part)]
        return []

    def _look(self, look: Callable[[], list[Any]]) -> None:
        self._looks.append((look, look()))


def _items(container: Any) -> list[Any]:
    return [*container, *container.values()] if isinstance(container, dict) else list(container)


def _same(now: list[Any], before: list[Any]) -> bool:
    return len(now) == len(before) and all(map(operator.is_, now, before))

"""The user's custom functions and algorithms, by the names that generated code has for them.

`register_op` provides them when the user's module is imported. A program that is loaded first
imports that module.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from shardwright.errors import InputError
from shardwright.layout import chunk_bounds

from ..world import Group

_FUNCTIONS: dict[str, Callable[..., Any]] = {}
_ALGORITHMS: dict[tuple[str, str], Callable[..., Any]] = {}


@dataclass(frozen=True, slots=True)
class SplitDim:
    """What a custom algorithm gets: the ranks that share the split dim, and its global size."""

    group: Group
    size: int

    @property
    def start(self) -> int:
        """The index of this rank's first element."""
        return chunk_bounds(self.size, self.group.size, self.group.index)[0]

    @property
    def length(self) -> int:
        """How many elements this rank has."""
        return chunk_bounds(self.size, self.group.size, self.group.index)[1]


def provide(path: str, function: Callable[..., Any]) -> None:
    """Let generated code call a function under a path, whatever stands there in its module."""
    _FUNCTIONS[path] = function


def provided(path: str) -> bool:
    return path in _FUNCTIONS


def provide_algorithm(path: str, label: str, function: Callable[..., Any]) -> None:
    """Let generated code call an algorithm for a split of an op."""
    _ALGORITHMS[path, label] = function


def find(path: str) -> Callable[..., Any]:
    """A function of the user's that the program calls, such as the `apply` of an autograd function."""
    if path in _FUNCTIONS:
        return _FUNCTIONS[path]
    function = _imported(path)
    if path in _FUNCTIONS:  # its module has registered it
        return _FUNCTIONS[path]
    if isinstance(function, type) and issubclass(function, torch.autograd.Function):
        function = _tensors_only(function.apply)
    if function is None:
        raise InputError(
            f"the program calls {path}, which can't be imported here; define it at the top level of a module"
        )
    return function  # type: ignore[no-any-return]


def _tensors_only(apply: Callable[..., Any]) -> Callable[..., Any]:
    """An autograd function as an op: what else it returns was fixed when the model was captured."""

    def call(*values: Any) -> Any:
        result = apply(*values)
        if isinstance(result, torch.Tensor):
            return result
        tensors = tuple(value for value in result if isinstance(value, torch.Tensor))
        return tensors[0] if len(tensors) == 1 else tensors

    return call


def _imported(path: str) -> Any:
    parts = path.split(".")
    for at in range(len(parts) - 1, 0, -1):
        name = ".".join(parts[:at])
        if name in sys.modules or importlib.util.find_spec(name) is not None:
            value: Any = importlib.import_module(name)
            for part in parts[at:]:
                value = getattr(value, part, None)
            return value
    return None


def custom_algorithm(path: str, label: str, group: Group, size: int) -> Callable[..., Any]:
    """The user's algorithm for an op whose label is split over a group."""
    if (path, label) not in _ALGORITHMS:
        _imported(path.removeprefix("call."))
    if (path, label) not in _ALGORITHMS:
        raise InputError(f"the program splits {path} on {label} by a custom algorithm, which is not registered here")
    algorithm = _ALGORITHMS[path, label]
    return lambda *args: algorithm(*args, part=SplitDim(group, size))

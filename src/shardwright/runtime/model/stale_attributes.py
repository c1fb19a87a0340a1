"""Attributes that the forward of a user's class sets: a program does not, so that reading one is refused.

The class of such a module becomes one of the same name with a descriptor for each of them, since nothing else sees a
read of an attribute that is there. Setting it is fine, and without effect on programs that set it themselves.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from shardwright.errors import InputError


class StaleAttribute:
    """An attribute whose value is from when the model was compiled."""

    def __init__(self, name: str, path: str) -> None:
        self._name, self._path = name, path

    def __get__(self, module: nn.Module | None, kind: type) -> Any:
        if module is None:
            return self
        raise InputError(
            f"the forward of {kind.__name__} sets self.{self._name}, which a program does not: the value of "
            f"{self._path} is from when the model was compiled; return it from forward"
        )

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._name] = value

    def __delete__(self, module: nn.Module) -> None:
        del vars(module)[self._name]


def refuse_reads(root: nn.Module, paths: Iterable[str]) -> None:
    """Refuse reads of attributes, each named by its path from the root module."""
    for path in paths:
        owner, _, name = path.rpartition(".")
        module = root.get_submodule(owner)
        kind = type(module)
        if not isinstance(kind.__dict__.get(name), StaleAttribute):
            members = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
            module.__class__ = type(kind.__name__, (kind,), {**members, name: StaleAttribute(name, f"model.{path}")})

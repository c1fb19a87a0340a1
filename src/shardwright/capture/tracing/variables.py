"""Variables outside of modules that a forward may read: globals, closure variables, class attributes.

What a trace reads of them is fixed in the graph, as attributes of modules are (attribute_reads.py). Nothing tells
when Python reads a global, so they are found in the code: from the `forward` of every module through all functions,
methods and classes that its names lead to. More may be found than is read, never less but for what is computed by
name (`globals()[key]`). Code of torch and of the standard library is not looked into, and neither are variables of
theirs.
"""

from __future__ import annotations

import os
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..copies import inside
from .bytecode import Chain, Step, reads_of

ABSENT: Any = type("Missing", (), {"__repr__": lambda self: "no such variable"})()
Hop = tuple[Callable[[Any, Any], Any], Any]
"""Something with a `get(key, default)`, and the key."""

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_LIBRARY = frozenset(sys.stdlib_module_names) | {"torch", "numpy", "shardwright", "builtins", "triton", "functorch"}
_HOLDING = frozenset({"types", "argparse", "collections", "functools"})  # whose objects lead to the user's
GRAD_MODE = "torch.is_grad_enabled()"
"""The key of the only setting of torch that is compared only where a forward reads it."""

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class Variable:
    """A variable, and what is read of it: where it begins, and the way from there."""

    key: Any  # equal for what is the same variable
    name: str  # as it is written
    place: str  # file and line of the function that reads it
    start: Hop
    steps: tuple[Step, ...] = ()

    def look(self) -> tuple[Any, list[Hop]]:
        """What it is now, and everything on the way that would have to change for it to be something else."""
        hops = [self.start]
        value = self.start[0](self.start[1], ABSENT)
        for kind, key in self.steps:
            reader = _reader(value, kind)
            if reader is None:
                return ABSENT, hops
            hops.append((reader, key))
            value = reader(key, ABSENT)
        return value, hops


def _reader(value: Any, kind: str) -> Callable[[Any, Any], Any] | None:
    if kind == "item" and isinstance(value, list | tuple):
        return lambda key, default: value[key] if -len(value) <= key < len(value) else default
    if kind == "attribute" and not hasattr(value, "__dict__"):
        return partial(getattr, value) if hasattr(type(value), "__slots__") else None
    container = vars(value) if kind == "attribute" else value
    return container.get if isinstance(container, dict | types.MappingProxyType) else None


@dataclass(slots=True)
class _Names:
    own: set[str]  # that are looked up in this class
    seen: set[str] = field(default_factory=set)


def _is_of_package(file: str) -> bool:
    return "site-packages" in file or "dist-packages" in file


def is_library(name: str | None) -> bool:
    """Whether a Python module is of torch, of the standard library or ours."""
    return (name or "").partition(".")[0] in _LIBRARY


class VariableWalk:
    """Goes from function to function. Names are collected, since a method counts once its name is mentioned.

    A name that is mentioned in the user's code may be one of any class. Packages have many more names, so that what
    their code mentions counts for the class only that the code is a method of.
    """

    def __init__(self, module: nn.Module) -> None:
        self.variables: dict[Any, Variable] = {}
        self.draws: list[str] = []  # where random numbers of Python and numpy are drawn
        self._names = {"forward"}
        self._seen: dict[int, Any] = {}  # by id, with what has it, so that no id is given twice
        self._classes: dict[type, _Names] = {}
        self._owners: list[tuple[dict[str, Any], type, set[str]]] = []  # attributes of modules, and what was looked at
        self._functions: list[tuple[types.FunctionType, type | None]] = []
        for part in module.modules():
            self._module(part)
        self.go_on(())

    def go_on(self, names: Iterable[str]) -> None:
        """Find what is reached by attributes that are known to be read."""
        self._names |= {*names} - _NOT_USED
        done = -1
        while done != (done := self._progress()):
            for kind, used in list(self._classes.items()):
                for name in (self._names | used.own) - used.seen:
                    self._attribute_of(kind, name)
                    used.seen.add(name)
            for attributes, kind, seen in self._owners:
                own = self._classes[kind].own if kind in self._classes else set()
                for name in ((self._names | own) & attributes.keys()) - seen:
                    self._object(attributes[name])
                    seen.add(name)
            while self._functions:
                self._function(*self._functions.pop())

    def _progress(self) -> int:
        return (
            len(self._names) + len(self._seen) + len(self.variables) + sum(len(n.own) for n in self._classes.values())
        )

    def _module(self, part: nn.Module) -> None:
        self._class(type(part))
        self._owners.append((vars(part), type(part), set()))

    def _class(self, kind: type) -> None:
        if issubclass(kind, torch.autograd.Function):
            return  # a program calls it as it is, and it reads its variables then
        if not is_library(kind.__module__) and kind not in self._classes:
            used = {name for base in kind.__mro__[:-1] for name in vars(base) if name.startswith("__")}
            self._classes[kind] = _Names(used - _NOT_USED)

    def _attribute_of(self, kind: type, name: str) -> None:
        """A name that may be looked up in a class: in it or in a base, and nearer than where it is today."""
        mro = [base for base in kind.__mro__ if not is_library(base.__module__)]
        holder = next((at for at, base in enumerate(mro) if name in vars(base)), None)
        if holder is None:
            return
        value = vars(mro[holder])[name]
        for base in mro[: holder + 1]:
            self._keep((base, name), f"{base.__qualname__}.{name}", _place_of(value), (vars(base).get, name))
        for inner in (value.fget, value.fset) if isinstance(value, property) else (getattr(value, "__func__", value),):
            self._object(inner, kind)

    def _object(self, start: Any, owner: type | None = None) -> None:
        """Whatever a name stands for: functions in it are gone through, and classes of it are looked up in."""
        todo = [start]
        while todo and len(self._seen) < _MOST:
            value = todo.pop()
            if value is None or isinstance(value, _PLAIN) or id(value) in self._seen:
                continue
            self._seen[id(value)] = value
            if isinstance(value, types.FunctionType):
                self._functions.append((value, owner))
                todo += inside(value)
            elif isinstance(value, type):
                self._class(value)
                if value in self._classes:
                    self._classes[value].own |= {"__init__", "__new__", "__post_init__", "forward", "backward"}
            elif isinstance(value, nn.Module):
                self._module(value)
            elif isinstance(value, types.MethodType) or not is_library(type(value).__module__):
                self._class(type(value))
                todo += inside(value)
            elif isinstance(value, _CONTAINERS) or type(value).__module__ in _HOLDING:
                todo += inside(value)

    def _function(self, function: types.FunctionType, owner: type | None) -> None:
        if is_library(function.__module__) or function.__code__.co_filename.startswith(_OURS):
            return  # what it closes over was gone through as any other object
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        todo = [function.__code__]
        while todo:
            code = todo.pop()
            reads = reads_of(code)
            if not _is_of_package(code.co_filename):
                self._names |= reads.names - _NOT_USED
            elif owner in self._classes:
                self._classes[owner].own |= reads.names - _NOT_USED
            todo += reads.inner
            for chain in reads.chains:
                self._follow(chain, function.__globals__, cells, f"{code.co_filename}:{chain.line}")

    def _follow(self, chain: Chain, variables: dict[str, Any], cells: Mapping[str, types.CellType], place: str) -> None:
        """Keep what a chain reads, as far as it leads through what can be looked at."""
        start: Hop
        if chain.free:
            if chain.name not in cells:
                return  # of the function around it
            cell = cells[chain.name]
            start, key = (_contents(cell), chain.name), id(cell)
            self._seen[id(cell)] = cell
        elif chain.name in variables:
            start, key = (variables.get, chain.name), id(variables)
        else:
            return  # built in, or not there yet
        value, steps, shown = start[0](start[1], ABSENT), [], chain.name
        for kind, name in chain.steps:
            if isinstance(value, types.ModuleType) and is_library(value.__name__):
                break
            if not _leads(value, kind, name):
                break
            reader = _reader(value, kind)
            assert reader is not None
            value = reader(name, ABSENT)
            steps.append((kind, name))
            shown += f".{name}" if kind == "attribute" else f"[{name!r}]"
        if isinstance(value, types.ModuleType) and is_library(value.__name__):
            self._keep_setting(value, chain, len(steps), place)
            return
        if isinstance(getattr(value, "__self__", None), random.Random) or _is_of_numpy_random(value):
            self.draws.append(place)
        self._keep((key, chain.name, tuple(steps)), shown, place, start, tuple(steps))
        if isinstance(value, types.ModuleType):
            for name in [name for name, member in vars(value).items() if isinstance(member, _PLAIN)]:
                self._keep((id(vars(value)), name), f"{shown}.{name}", place, (vars(value).get, name))
        else:
            self._object(value)

    def _keep_setting(self, library: types.ModuleType, chain: Chain, at: int, place: str) -> None:
        """What a forward reads of torch and of the environment."""
        name = chain.steps[at][1] if at < len(chain.steps) else ""
        if library.__name__ == "random" or (library.__name__ == "numpy" and name == "random"):
            self.draws.append(place)
        if library is torch and name == "is_grad_enabled":
            self._keep(GRAD_MODE, GRAD_MODE, place, (lambda key, default: torch.is_grad_enabled(), name))
        if library is os and name in ("environ", "getenv"):
            rest = [key for kind, key in chain.steps[at + 1 :] if kind == "item"] or [chain.argument]
            raw: dict[bytes, bytes] = vars(os.environ)["_data"]
            if isinstance(rest[0], str):
                key = os.fsencode(rest[0])
                self._keep(("environ", key), f"os.environ[{rest[0]!r}]", place, (raw.get, key))
            else:
                self._keep("environ", "os.environ", place, (vars(os.environ).get, "_data"))

    def _keep(self, key: Any, name: str, place: str, start: Hop, steps: tuple[Step, ...] = ()) -> None:
        self.variables.setdefault(key, Variable(key, name, place, start, steps))


_PLAIN = (bool, int, float, complex, str, bytes)
_NOT_USED = frozenset(
    "__init__ __new__ __init_subclass__ __subclasshook__ __class_getitem__ __doc__ __module__ __dict__ __weakref__ "
    "__annotations__ __qualname__ __slots__ __repr__ __reduce__ __reduce_ex__ __getstate__ __setstate__ __dir__ "
    "__class__ __sizeof__ __abstractmethods__ __firstlineno__ __static_attributes__".split()
)


def _leads(value: Any, kind: str, name: Any) -> bool:
    """Whether what is read of a value can be compared by itself; else all of the value is."""
    if kind == "item":
        if isinstance(value, list | tuple):
            return isinstance(name, int)
        return isinstance(value, dict) and isinstance(name, _PLAIN)
    if isinstance(value, types.ModuleType):
        return True
    if isinstance(value, type | nn.Module | Tensor | types.FunctionType | types.MethodType):
        return False
    if name in getattr(value, "__dict__", ()):
        return not isinstance(getattr(type(value), name, None), property)
    return any(name in getattr(base, "__slots__", ()) for base in type(value).__mro__)


def _is_of_numpy_random(value: Any) -> bool:
    return type(getattr(value, "__self__", None)).__module__.startswith("numpy.random")


def _contents(cell: types.CellType) -> Callable[[Any, Any], Any]:
    def get(_: Any, default: Any) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # nothing was assigned yet
            return default

    return get


def _place_of(value: Any) -> str:
    code = getattr(getattr(value, "__func__", getattr(value, "fget", value)), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""

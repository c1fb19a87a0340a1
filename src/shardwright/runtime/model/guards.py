"""Guards: a program's constants, checked before each call.

A program is compiled for the values that forward read: `self.scale`, the `p` of a dropout, a number in
`self.config`, a global, a class attribute, the default dtype. They are recorded here, and what differs from the
first time is part of the key of a program (`state`): a new value compiles a new program, and an old one finds its
program again.

    watch      these attributes were read, and these variables may have been
    state      which of them have changed; () as long as none has

Structure (submodules, parameters, hooks) is pinned instead and can't be changed (pinned.py).
"""

from __future__ import annotations

import operator
import warnings
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from shardwright.errors import InputError
from shardwright.frozen_values import ABSENT, Contents, freeze

ALL = "*"
SLOTS = ("_parameters", "_buffers", "_modules")
Hop = tuple[Callable[[Any, Any], Any], Any]
"""Something with a `get(key, default)`, and the key."""

MANY = 8
"""Warn from this number of programs that differ in one value."""

State = tuple[tuple[str, str, Hashable], ...]
Carry = Callable[[str, str, Any], None]
"""Passes a changed attribute (module path, name, value or ABSENT) to the compiler."""


class Watchable(Protocol):
    """A global, a closure variable or a class attribute (`capture.variables.Variable`)."""

    @property
    def key(self) -> Hashable: ...

    @property
    def name(self) -> str: ...

    def look(self) -> tuple[Any, list[Hop]]: ...


@dataclass(frozen=True, slots=True)
class TorchSetting:
    """A global torch setting that affects results."""

    name: str
    ask: Callable[[], Any]

    @property
    def key(self) -> str:
        return self.name

    def look(self) -> tuple[Any, list[Hop]]:
        value = self.ask()
        return value, [(lambda key, default: self.ask(), self.name)]


def settings_of(device: str) -> list[TorchSetting]:
    """The torch settings that a program's dtypes depend on."""

    def autocast() -> torch.dtype | None:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    return [TorchSetting("torch.get_default_dtype()", torch.get_default_dtype), TorchSetting("autocast", autocast)]


@dataclass(slots=True)
class _Watched:
    path: str | None  # of the module, if it is an attribute
    name: str
    look: Callable[[], tuple[Any, list[Hop]]]
    known: Hashable  # its value at the last check
    first: Hashable  # its value when first read


class AttributeGuard:
    """Guards the attributes of a model's modules, and the variables that its code reads."""

    def __init__(self, modules: dict[str, nn.Module], carry: Carry | None) -> None:
        self._modules, self._carry = modules, carry
        self._watched: dict[Hashable, _Watched] = {}
        self._ignored: set[Hashable] = set()
        self._places: list[Hop] = []
        self._last: list[Any] = []  # the objects at the last check
        self._contents = Contents(())
        self._alive: dict[int, Any] = {}  # so that no id is reused
        self._state: State = ()
        self._attributes = {path: dict(vars(module)) for path, module in modules.items()}
        self.watch((path, "forward") for path in modules if path)

    def watch(self, reads: Iterable[tuple[str, str]], variables: Iterable[Watchable] = ()) -> None:
        """Guard these too. A program was just compiled for their values."""
        for path, name in sorted(self._expanded(reads)):
            self._add((path, name), path, name, _look_at(vars(self._modules[path]), name))
        for variable in variables:
            self._add(("variable", variable.key), None, variable.name, variable.look)
        self._remember()

    def _add(self, key: Hashable, path: str | None, name: str, look: Callable[[], tuple[Any, list[Hop]]]) -> None:
        if key not in self._watched and key not in self._ignored:
            first = freeze(look()[0], self._alive)
            self._watched[key] = _Watched(path, name, look, first, first)

    def catch_up(self) -> None:
        """Pass on all changed attributes, whether a program has read them or not."""
        for path, module in self._modules.items():
            now, before = vars(module), self._attributes[path]
            for name in {**before, **now}:
                value = now.get(name, ABSENT)
                if value is not before.get(name, ABSENT) and name not in _BARE and (path, name) not in self._watched:
                    self._change(path, name, value)
            self._attributes[path] = dict(now)

    def forget(self, path: str, name: str) -> None:
        """Stop guarding an attribute that something else handles."""
        self._ignored.add((path, name))
        if self._watched.pop((path, name), None) is not None:
            self._remember()

    def state(self) -> State:
        """What differs from the first read. Changes since the last check are passed on."""
        now = [get(name, ABSENT) for get, name in self._places]
        if all(map(operator.is_, now, self._last)) and self._contents.same():
            return self._state
        for watched in self._watched.values():
            value = watched.look()[0]
            frozen = freeze(value, self._alive)
            if frozen != watched.known:
                if watched.path is not None:
                    self._change(watched.path, watched.name, value)
                watched.known = frozen
        self._remember()
        return self._state

    def _change(self, path: str, name: str, value: Any) -> None:
        if name == "forward" and path:
            raise InputError(
                f"the forward of {path} was replaced after the model was parallelized, which its programs ignore; "
                "replace it before sw.parallelize"
            )
        if name != "forward" and self._carry is not None:
            self._carry(path, name, value)

    def _remember(self) -> None:
        looks = [watched.look() for watched in self._watched.values()]
        places = {(_identity(get), name): (get, name) for _, hops in looks for get, name in hops}
        self._places = list(places.values())
        self._last = [get(name, ABSENT) for get, name in self._places]
        self._contents = Contents(value for value, _ in looks)
        changed = (watched for watched in self._watched.values() if watched.known != watched.first)
        self._state = tuple((watched.path or "", watched.name, watched.known) for watched in changed)

    def _expanded(self, reads: Iterable[tuple[str, str]]) -> set[tuple[str, str]]:
        """Names instead of ALL, without submodules, parameters and buffers."""
        expanded: set[tuple[str, str]] = set()
        for path, name in reads:
            module = self._modules.get(path)
            if module is not None:
                names = [key for key in vars(module) if key not in _BARE] if name == ALL else [name]
                expanded |= {(path, key) for key in names if not any(key in vars(module)[slot] for slot in SLOTS)}
        return expanded


_BARE = frozenset(vars(nn.Module()))


def _look_at(attributes: dict[str, Any], name: str) -> Callable[[], tuple[Any, list[Hop]]]:
    hops: list[Hop] = [(attributes.get, name)]
    return lambda: (attributes.get(name, ABSENT), hops)


def _identity(get: Callable[..., Any]) -> int:
    """Which dict a getter reads; a bound method is a new object each time."""
    owner = getattr(get, "__self__", None)
    return id(get) if owner is None else id(owner)


def warn_of_many(keys: Iterable[Any], key: Any) -> None:
    """Warn once if every new value of a number compiles a new program.

    A key is ((method, modes, state), the structure of the arguments, a description of each, ...): see
    `ModelView.constants` and `ParallelModel._entry`.
    """
    (method, modes, state), spec, leaves, *rest = key
    attributes: set[Hashable] = set()
    numbers: dict[int, set[str]] = {}
    for (other, flags, values), structure, others, *more in keys:
        if (other, flags, structure, more) != (method, modes, spec, rest) or len(others) != len(leaves):
            continue
        apart = [index for index, leaf in enumerate(leaves) if leaf != others[index]]
        if not apart and values != state:
            attributes.add(values)
        elif len(apart) == 1 and isinstance(others[apart[0]], str) and values == state:
            numbers.setdefault(apart[0], set()).add(others[apart[0]])
    if len(attributes) == MANY:
        names = sorted({f"{path}.{name}".lstrip(".") for path, name, _ in state})
        _warn(f"of {', '.join(names)}, which the forward reads", "pass it to forward as a tensor, or make it a buffer")
    for index, values in numbers.items():
        if len(values) == MANY:
            _warn(f"that argument {index} had ({leaves[index]} now)", "pass torch.tensor(value) instead of a number")


def why_new(keys: Iterable[Any], key: Any) -> str:
    """Why a call needs a new program: the first reason that applies."""
    known = [(*constants, *rest) for constants, *rest in keys]
    (method, modes, state), spec, leaves, *_ = key
    if method not in {other[0] for other in known}:
        return f"it is the first call of {method or 'forward'}"
    known = [other for other in known if other[0] == method]
    if spec not in {other[3] for other in known}:
        return "it passes other arguments, by their names or nesting"
    shapes = [leaf for leaf in leaves if not isinstance(leaf, str)]
    if not any([leaf for leaf in other[4] if not isinstance(leaf, str)] == shapes for other in known):
        return "it passes other shapes, dtypes or requires_grad"
    if modes not in {other[1] for other in known}:
        return "other modules are in train or eval mode"
    if state not in {other[2] for other in known}:
        names = sorted({f"{path}.{name}".lstrip(".") for path, name, _ in state})
        return f"{', '.join(names) or 'a value that forward reads'} was changed"
    return "it passes other values"


def _warn(what: str, remedy: str) -> None:
    warnings.warn(
        f"{MANY} programs were compiled for values {what}: each value is a constant of a new program; {remedy}",
        UserWarning,
        stacklevel=3,
    )

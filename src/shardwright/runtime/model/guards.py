"""What a program holds as constants, looked at before each call.

A program is made for the values that a forward read: `self.scale`, the `p` of a dropout, a number in
`self.config`, a global, a class attribute, the default dtype. They are remembered here, and what differs from the
first time is part of the key of a program (`state`): a new value compiles a new program, and an old one finds its
program again.

    watch      these attributes were read, and these variables may have been
    state      what of them has changed; () as long as nothing has

Structure (submodules, parameters, hooks) is pinned instead, and refuses to be changed (pinned.py).
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

from .frozen_values import ABSENT, Contents, freeze

ALL = "*"
SLOTS = ("_parameters", "_buffers", "_modules")
Hop = tuple[Callable[[Any, Any], Any], Any]
"""Something with a `get(key, default)`, and the key."""

MANY = 8
"""So many programs that differ in one value are worth a warning."""

State = tuple[tuple[str, str, Hashable], ...]
Carry = Callable[[str, str, Any], None]
"""Takes a changed attribute (the path of its module, its name, its value or ABSENT) to where programs are made."""


class Watchable(Protocol):
    """A global, a closure variable or a class attribute (`capture.variables.Variable`)."""

    @property
    def key(self) -> Hashable: ...

    @property
    def name(self) -> str: ...

    def look(self) -> tuple[Any, list[Hop]]: ...


@dataclass(frozen=True, slots=True)
class TorchSetting:
    """A setting of torch that decides what ops make."""

    name: str
    ask: Callable[[], Any]

    @property
    def key(self) -> str:
        return self.name

    def look(self) -> tuple[Any, list[Hop]]:
        value = self.ask()
        return value, [(lambda key, default: self.ask(), self.name)]


def settings_of(device: str) -> list[TorchSetting]:
    """What the dtypes of a program's values depend on."""

    def autocast() -> torch.dtype | None:
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None

    return [TorchSetting("torch.get_default_dtype()", torch.get_default_dtype), TorchSetting("autocast", autocast)]


@dataclass(slots=True)
class _Watched:
    path: str | None  # of the module whose attribute it is, if it is one
    name: str
    look: Callable[[], tuple[Any, list[Hop]]]
    known: Hashable  # what it was at the last look
    first: Hashable  # what it was when it was first read


class AttributeGuard:
    """The attributes of a model's modules, as the user sees and changes them, and the variables that its code reads."""

    def __init__(self, modules: dict[str, nn.Module], carry: Carry | None) -> None:
        self._modules, self._carry = modules, carry
        self._watched: dict[Hashable, _Watched] = {}
        self._ignored: set[Hashable] = set()
        self._places: list[Hop] = []
        self._last: list[Any] = []  # what was there at the last look
        self._contents = Contents(())
        self._alive: dict[int, Any] = {}  # so that no id is given twice
        self._state: State = ()
        self._attributes = {path: dict(vars(module)) for path, module in modules.items()}
        self.watch((path, "forward") for path in modules if path)

    def watch(self, reads: Iterable[tuple[str, str]], variables: Iterable[Watchable] = ()) -> None:
        """From now on look at these too. A program was just made for what they are."""
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
        """Carry over what has changed of all attributes, whether a program has read them or not."""
        for path, module in self._modules.items():
            now, before = vars(module), self._attributes[path]
            for name in {**before, **now}:
                value = now.get(name, ABSENT)
                if value is not before.get(name, ABSENT) and name not in _BARE and (path, name) not in self._watched:
                    self._change(path, name, value)
            self._attributes[path] = dict(now)

    def forget(self, path: str, name: str) -> None:
        """Look at an attribute no longer, since someone else looks after it."""
        self._ignored.add((path, name))
        if self._watched.pop((path, name), None) is not None:
            self._remember()

    def state(self) -> State:
        """What differs from when it was first read. What the user has changed since the last look is carried over."""
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
                f"the forward of {path} was replaced after the model was parallelized, which its programs don't see; "
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
        """Names in the place of ALL, and nothing that is a submodule, a parameter or a buffer."""
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
    """Which dict something reads; a method of one is another object each time."""
    owner = getattr(get, "__self__", None)
    return id(get) if owner is None else id(owner)


def warn_of_many(keys: Iterable[Any], key: Any) -> None:
    """Say so once where one number after the other compiles a program of its own.

    A key is ((method, modes, state), the structure of the arguments, what each of them is, ...): see
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
    """In which way a call is unlike all before: the first of these that holds."""
    known = [(*constants, *rest) for constants, *rest in keys]
    (method, modes, state), spec, leaves, *_ = key
    if method not in {other[0] for other in known}:
        return f"it is the first of {method or 'forward'}"
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
        return f"{', '.join(names) or 'what the forward reads'} was changed"
    return "it passes other values"


def _warn(what: str, remedy: str) -> None:
    warnings.warn(
        f"{MANY} programs were compiled for values {what}: each value is a constant of a program of its own; {remedy}",
        UserWarning,
        stacklevel=3,
    )

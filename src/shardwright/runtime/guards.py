"""Attributes that a program holds as constants, looked at before each call.

A program is made for the values that a forward read: `self.scale`, the `p` of a dropout, a number in
`self.config`, an array, a setting of the class. They are remembered here, and what differs from the first time is part
of the key of a program (`state`): a new value compiles a new program, and an old watched finds its program again.

    watch      these attributes were read
    state      what of them has changed; () as long as nothing has

Structure (submodules, parameters, hooks) is pinned instead, and refuses to be changed (pinned.py).
"""

from __future__ import annotations

import operator
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from shardwright.errors import InputError

ALL = "*"
ABSENT: Any = type("Absent", (), {"__repr__": lambda self: "no such attribute"})()
SLOTS = ("_parameters", "_buffers", "_modules")
_VALUES = (type(None), bool, int, float, complex, str, bytes)
_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_LARGEST = 20_000  # a container of more is data, not a setting

MANY = 8
"""So many programs that differ in one value are worth a warning."""

State = tuple[tuple[str, str, Hashable], ...]
Carry = Callable[[str, str, Any], None]
"""Takes a changed attribute (the path of its module, its name, its value or ABSENT) to where programs are made."""


@dataclass(slots=True)
class _Watched:
    path: str
    name: str
    attributes: Mapping[str, Any]  # where it is found
    known: Hashable  # what it was at the last look
    first: Hashable  # what it was when it was first read
    shared: bool = False  # with all objects of its class


class AttributeGuard:
    """The attributes of a model's modules, as the user sees and changes them."""

    def __init__(self, modules: dict[str, nn.Module], carry: Carry | None) -> None:
        self._modules, self._carry = modules, carry
        self._watched: dict[tuple[str, str], _Watched] = {}
        self._ignored: set[tuple[str, str]] = set()
        self._places: list[tuple[Mapping[str, Any], str]] = []
        self._last: list[Any] = []  # what was there at the last look
        self._inside: list[tuple[Any, list[Any]]] = []  # the containers in it, and what those held
        self._alive: dict[int, Any] = {}  # so that no id is given twice
        self._state: State = ()
        self._whole = {path: dict(vars(module)) for path, module in modules.items()}
        self.watch((path, "forward") for path in modules if path)

    def watch(self, reads: Iterable[tuple[str, str]]) -> None:
        """From now on look at these too. A program was just made for what they are."""
        for path, name in sorted(self._expanded(reads) - self._ignored - self._watched.keys()):
            attributes = vars(self._modules[path])
            first = freeze(attributes.get(name, ABSENT), self._alive)
            self._watched[path, name] = _Watched(path, name, attributes, first, first)
            shared = _class_with(type(self._modules[path]), name) if first == freeze(ABSENT, self._alive) else None
            if shared is not None:
                first = freeze(shared[name], self._alive)
                self._watched[path, f"{_OF_CLASS}{name}"] = _Watched(path, name, shared, first, first, shared=True)
        self._remember()

    def catch_up(self) -> None:
        """Carry over what has changed of all attributes, whether a program has read them or not."""
        for path, module in self._modules.items():
            now, before = vars(module), self._whole[path]
            for name in {**before, **now}:
                value = now.get(name, ABSENT)
                if value is not before.get(name, ABSENT) and name not in _BARE and (path, name) not in self._watched:
                    self._change(path, name, value)
            self._whole[path] = dict(now)

    def forget(self, path: str, name: str) -> None:
        """Look at an attribute no longer, since someone else looks after it."""
        self._ignored.add((path, name))
        if self._watched.pop((path, name), None) is not None:
            self._remember()

    def state(self) -> State:
        """What differs from when it was first read. What the user has changed since the last look is carried over."""
        now = [attributes.get(name, ABSENT) for attributes, name in self._places]
        same = all(map(operator.is_, now, self._last))
        if same and all(_same(_items(container), before) for container, before in self._inside):
            return self._state
        for watched, value in zip(self._watched.values(), now, strict=True):
            frozen = freeze(value, self._alive)
            if frozen != watched.known:
                if not watched.shared:  # programs are made of modules of the same class
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
        every = self._watched.values()
        self._places = [(watched.attributes, watched.name) for watched in every]
        self._last = [attributes.get(name, ABSENT) for attributes, name in self._places]
        self._inside = [(container, _items(container)) for container in _containers(self._last)]
        changed = (watched for watched in every if watched.known != watched.first)
        self._state = tuple((watched.path, watched.name, watched.known) for watched in changed)

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
_OF_CLASS = "class."


def _class_with(kind: type, name: str) -> Mapping[str, Any] | None:
    """The attributes of the class that gives its objects a setting of this name; None if there is none."""
    found = next((vars(base) for base in kind.__mro__ if name in vars(base)), None)
    is_setting = found is not None and isinstance(found[name], (*_VALUES, *_CONTAINERS, np.ndarray, Tensor))
    return found if is_setting else None


def freeze(value: Any, alive: dict[int, Any], seen: dict[int, int] | None = None) -> Hashable:
    """A value as something that can be compared and hashed: by what it holds, or else by what it is.

    What is met again is known by when it was met first. What is very large is not looked into.
    """
    kind = type(value)
    if kind in _VALUES:
        return (kind.__name__, repr(value))
    seen = {} if seen is None else seen
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    if isinstance(value, np.ndarray) and value.dtype != object:
        return (kind, value.shape, value.dtype.str, value.tobytes())
    inner: Any = attributes_of(value) if is_record(value) else value
    if isinstance(inner, _CONTAINERS) and len(inner) < _LARGEST and len(seen) < _LARGEST:
        if isinstance(inner, dict):
            return (kind, tuple((freeze(k, alive, seen), freeze(v, alive, seen)) for k, v in inner.items()))
        order = sorted(inner, key=repr) if isinstance(inner, set | frozenset) else inner
        return (kind, tuple(freeze(item, alive, seen) for item in order))
    alive[id(value)] = value
    return ("is", id(value), value._version if isinstance(value, Tensor) else 0)


def is_record(value: Any) -> bool:
    """Whether something is an object that is no more than its attributes, such as a config, or a function with some."""
    if isinstance(value, (nn.Module, Tensor, type, np.ndarray, *_CONTAINERS)):
        return False
    if callable(value) and type(value).__module__.split(".")[0] in _OTHERS:
        return False
    return hasattr(value, "__dict__") or bool(_slots(type(value)))


_OTHERS = ("builtins", "functools", "torch", "numpy", "types", "operator")  # whose functions keep nothing of a model


def attributes_of(value: Any) -> dict[str, Any]:
    """The attributes of a record, those in slots too."""
    own: dict[str, Any] = getattr(value, "__dict__", {})
    slots = _slots(type(value))
    return {**own, **{name: getattr(value, name) for name in slots if hasattr(value, name)}} if slots else own


_SLOTS_OF: dict[type, tuple[str, ...]] = {}


def _slots(kind: type) -> tuple[str, ...]:
    if kind not in _SLOTS_OF:
        every = [vars(base).get("__slots__", ()) for base in kind.__mro__]
        names = [name for slots in every for name in ((slots,) if isinstance(slots, str) else slots)]
        _SLOTS_OF[kind] = tuple(name for name in names if name not in ("__dict__", "__weakref__"))
    return _SLOTS_OF[kind]


def _containers(values: Iterable[Any]) -> list[Any]:
    """Everything in some values that can be changed in place, each once."""
    containers: dict[int, Any] = {}
    todo = list(values)
    while todo and len(containers) < _LARGEST:
        value = todo.pop()
        if type(value) in _VALUES or id(value) in containers:
            continue
        if isinstance(value, (*_CONTAINERS, Tensor, np.ndarray)) or is_record(value):
            containers[id(value)] = value
            inner: Any = attributes_of(value) if is_record(value) else value
            if isinstance(inner, _CONTAINERS) and len(inner) < _LARGEST:
                todo += inner.values() if isinstance(inner, dict) else inner
    return list(containers.values())


def _items(container: Any) -> list[Any]:
    if isinstance(container, Tensor):
        return [container._version]
    if isinstance(container, np.ndarray):
        return [container.tobytes()]
    inner: Any = container if isinstance(container, _CONTAINERS) else attributes_of(container)
    return [*inner, *inner.values()] if isinstance(inner, dict) else list(inner)


def _same(now: Sequence[Any], before: Sequence[Any]) -> bool:
    if len(now) != len(before):
        return False
    return all(map(operator.is_, now, before)) or all(map(_alike, now, before))


def _alike(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and type(now) in (bytes, int) and bool(now == before))


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


def _warn(what: str, remedy: str) -> None:
    warnings.warn(
        f"{MANY} programs were compiled for values {what}: each value is a constant of a program of its own; {remedy}",
        UserWarning,
        stacklevel=3,
    )

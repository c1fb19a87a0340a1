"""A deep copy of a module in which functions read the copy too.

`copy.deepcopy` takes a function as it is, with its closure. A model that keeps one among its attributes

    m = self.mlp
    self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

would then have a copy whose `mlpf` computes with the parameters of the original. So every function that the
copy holds, and that can reach a module or a tensor of the original, is made anew with cells and defaults of its own.
What a function reaches by a global name stays the original's: a capture refuses to read it (foreign.py).
"""

from __future__ import annotations

import copy
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

Module = TypeVar("Module", bound=nn.Module)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy, functions included. `memo` says what stands for what, as in `copy.deepcopy`."""
    memo = {} if memo is None else memo
    copied = copy.deepcopy(module, memo)
    rebind = _Rebind(memo)
    for part in copied.modules():
        changed = {name: rebind(held) for name, held in vars(part).items() if name not in _TENSORS}
        vars(part).update({name: held for name, held in changed.items() if held is not vars(part)[name]})
    return copied


_TENSORS = ("_parameters", "_buffers", "_modules")


class _Rebind:
    """Puts copies in the place of what a memo of `copy.deepcopy` knows; all else stays the object that it is."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._reaches: dict[int, bool] = {}
        self._made: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is given twice

    def __call__(self, held: Any) -> Any:
        if isinstance(held, _ATOMS) or not self._reach(held):
            return held
        if id(held) in self._memo and not isinstance(held, types.FunctionType):
            return self._memo[id(held)]
        if id(held) not in self._made:
            self._alive.append(held)
            for kind, rebuild in _REBUILDS:
                if isinstance(held, kind):
                    self._made[id(held)] = rebuild(held, self)
                    break
            else:
                self._object(held)
        return self._made[id(held)]

    def keep(self, original: Any, made: Any) -> None:
        """Know what is made of something before all of it is: a function may reach itself."""
        self._made[id(original)] = made

    def cell(self, original: types.CellType) -> types.CellType:
        """One new cell for each old one: two functions that share a variable go on sharing it."""
        self._alive.append(original)
        made: types.CellType = self._made.setdefault(id(original), types.CellType())
        return made

    def _object(self, held: Any) -> None:
        made = copy.copy(held)
        self.keep(held, made)
        vars(made).update({name: self(inner) for name, inner in vars(held).items()})

    def _reach(self, start: Any) -> bool:
        """Whether something leads to a module or a tensor of the original."""
        if id(start) in self._reaches:
            return self._reaches[id(start)]
        seen: set[int] = set()
        todo = [start]
        while todo:
            held = todo.pop()
            if id(held) in seen or isinstance(held, _ATOMS):
                continue
            seen.add(id(held))
            self._alive.append(held)
            if id(held) in self._memo and isinstance(held, nn.Module | Tensor):
                self._reaches[id(start)] = True
                return True
            if not isinstance(held, nn.Module | Tensor):
                todo += inside(held)
        self._reaches.update(dict.fromkeys(seen, False))  # none of them leads there
        return False


def inside(held: Any) -> Iterable[Any]:
    """What an object leads to."""
    if isinstance(held, types.FunctionType):
        cells = [cell.cell_contents for cell in held.__closure__ or () if _is_full(cell)]
        return [*cells, *(held.__defaults__ or ()), *(held.__kwdefaults__ or {}).values(), *vars(held).values()]
    if isinstance(held, types.MethodType):
        return [held.__func__, held.__self__]
    if isinstance(held, functools.partial):
        return [held.func, *held.args, *held.keywords.values()]
    if isinstance(held, weakref.ref):
        return [held()]
    if isinstance(held, dict):
        return list(held.values())
    if isinstance(held, list | tuple | set | frozenset):
        return list(held)
    return list(vars(held).values()) if hasattr(held, "__dict__") else []


def _is_full(cell: types.CellType) -> bool:
    return cell != types.CellType()  # cells are compared by what they hold, and an empty one is like no other


def _function(held: types.FunctionType, rebind: _Rebind) -> Any:
    cells = tuple(rebind.cell(cell) for cell in held.__closure__ or ())
    made = types.FunctionType(held.__code__, held.__globals__, held.__name__, None, cells or None)
    rebind.keep(held, made)
    for mine, cell in zip(cells, held.__closure__ or (), strict=True):
        if _is_full(cell) and not _is_full(mine):
            mine.cell_contents = cell.cell_contents  # it may lead back to a function that shares the cell
            mine.cell_contents = rebind(cell.cell_contents)
    made.__defaults__ = rebind(held.__defaults__)
    made.__kwdefaults__ = rebind(held.__kwdefaults__)
    made.__qualname__, made.__module__, made.__doc__ = held.__qualname__, held.__module__, held.__doc__
    made.__annotations__ = held.__annotations__
    vars(made).update({name: rebind(inner) for name, inner in vars(held).items()})
    return made


def _mapping(held: Any, rebind: _Rebind) -> Any:
    made = copy.copy(held)
    rebind.keep(held, made)
    made.update({key: rebind(inner) for key, inner in held.items()})
    return made


def _list(held: list[Any], rebind: _Rebind) -> Any:
    made = copy.copy(held)
    rebind.keep(held, made)
    made[:] = [rebind(inner) for inner in held]
    return made


def _tuple(held: tuple[Any, ...], rebind: _Rebind) -> Any:
    inner = [rebind(one) for one in held]
    return type(held)(*inner) if hasattr(held, "_fields") else type(held)(inner)


_REBUILDS: tuple[tuple[Any, Callable[[Any, _Rebind], Any]], ...] = (
    (types.FunctionType, _function),
    (types.MethodType, lambda held, rebind: types.MethodType(rebind(held.__func__), rebind(held.__self__))),
    (
        functools.partial,
        lambda held, rebind: functools.partial(
            rebind(held.func),
            *(rebind(arg) for arg in held.args),
            **{key: rebind(value) for key, value in held.keywords.items()},
        ),
    ),
    (weakref.ref, lambda held, rebind: weakref.ref(rebind(held()))),
    (dict, _mapping),
    (list, _list),
    (tuple | set | frozenset, _tuple),
)

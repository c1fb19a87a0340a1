"""A deep copy of a module in which functions read the copy too.

`copy.deepcopy` takes a function as it is, with its closure. A model that has one among its attributes

    m = self.mlp
    self.mlpf = lambda x: m.c_proj(m.act(m.c_fc(x)))

would then have a copy whose `mlpf` computes with the parameters of the original. So every function that the
copy has, and that can reach a module or a tensor of the original, is copied with new cells and defaults.
What a function reaches by a global name stays the original's: a capture refuses to read it (foreign_parameters.py).
"""

from __future__ import annotations

import copy
import dis
import functools
import types
import weakref
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torch import Tensor, nn

from ..errors import InputError, ShardwrightError

Module = TypeVar("Module", bound=nn.Module)
_ATOMS = (str, bytes, int, float, complex, bool, type(None), type, types.ModuleType, types.BuiltinFunctionType)


def copy_module(module: Module, memo: dict[int, Any] | None = None) -> Module:
    """A deep copy, functions included. `memo` maps originals to copies, as in `copy.deepcopy`."""
    memo = {} if memo is None else memo
    for tensor in _computed(module):
        memo.setdefault(id(tensor), tensor.detach().clone())
    try:
        copied = copy.deepcopy(module, memo)
    except ShardwrightError:
        raise
    except Exception as error:
        raise InputError(_uncopied(module, error)) from error
    rebind = _Rebind(memo)
    rebind.find_writes(value for part in copied.modules() for name, value in vars(part).items() if name not in _TENSORS)
    for part in copied.modules():
        changed = {name: rebind(value) for name, value in vars(part).items() if name not in _TENSORS}
        vars(part).update({name: value for name, value in changed.items() if value is not vars(part)[name]})
    return copied


def _uncopied(module: nn.Module, error: Exception) -> str:
    """Which attribute of a module can't be copied, if it is one."""
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            if name in _TENSORS:
                continue
            try:
                copy.deepcopy(value, {id(part): part for part in module.modules()})
            except Exception as fault:
                where = f"{path}.{name}" if path else name
                return (
                    f"the model can't be copied, since its attribute {where}, a {type(value).__name__}, can't "
                    f"({type(fault).__name__}: {fault}); keep it outside of the model, or give its class a __deepcopy__"
                )
    return f"the model can't be copied ({type(error).__name__}: {error}); copy.deepcopy(model) has to work"


def _computed(module: nn.Module) -> Iterable[Tensor]:
    """Attributes with a history, such as the weight that a hook of `nn.utils.weight_norm` computes at every call."""
    values = (value for part in module.modules() for value in vars(part).values())
    return [value for value in values if isinstance(value, Tensor) and not value.is_leaf]


def rebind(value: Any, memo: dict[int, Any]) -> Any:
    """A value with the modules and tensors that it leads to replaced by their copies; itself if there are none."""
    rebind = _Rebind(memo)
    rebind.find_writes([value])
    return rebind(value)


_TENSORS = ("_parameters", "_buffers", "_modules")


class _Rebind:
    """Puts copies in the place of what a memo of `copy.deepcopy` knows; all else stays the object that it is."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._reaches: dict[int, bool] = {}
        self._rebuilt: dict[int, Any] = {}
        self._alive: list[Any] = []  # so that no id is given twice
        self._written: set[int] = set()  # cells that a function writes to

    def find_writes(self, values: Iterable[Any]) -> None:
        """Learn which variables are written by the functions that some values lead to."""
        seen: set[int] = set()
        todo = list(values)
        while todo:
            value = todo.pop()
            if isinstance(value, (*_ATOMS, nn.Module, Tensor)) or id(value) in seen:
                continue
            seen.add(id(value))
            self._alive.append(value)
            todo += inside(value)
            if isinstance(value, types.FunctionType) and value.__closure__:
                names = zip(value.__code__.co_freevars, value.__closure__, strict=True)
                written = writes_of(value.__code__)
                self._written |= {id(cell) for name, cell in names if name in written}

    def __call__(self, value: Any) -> Any:
        if isinstance(value, _ATOMS) or not self._reach(value):
            return value
        if id(value) in self._memo and not isinstance(value, types.FunctionType):
            return self._memo[id(value)]
        if id(value) not in self._rebuilt:
            self._alive.append(value)
            for kind, rebuild in _REBUILDS:
                if isinstance(value, kind):
                    self._rebuilt[id(value)] = rebuild(value, self)
                    break
            else:
                self._object(value)
        return self._rebuilt[id(value)]

    def keep(self, original: Any, fresh: Any) -> None:
        """Know what is made of something before all of it is: a function may reach itself."""
        self._rebuilt[id(original)] = fresh

    def cell(self, original: types.CellType) -> types.CellType:
        """One new cell for each old one: two functions that share a variable still share it.

        A variable that leads to no module and that no function writes stays the user's own, so that a later change
        of it is seen.
        """
        self._alive.append(original)
        if id(original) not in self._written and _is_full(original) and not self._reach(original.cell_contents):
            return original
        fresh: types.CellType = self._rebuilt.setdefault(id(original), types.CellType())
        return fresh

    def _object(self, value: Any) -> None:
        fresh = copy.copy(value)
        self.keep(value, fresh)
        vars(fresh).update({name: self(inner) for name, inner in vars(value).items()})

    def _reach(self, start: Any) -> bool:
        """Whether something leads to a module or a tensor of the original."""
        if id(start) in self._reaches:
            return self._reaches[id(start)]
        seen: set[int] = set()
        todo = [start]
        while todo:
            value = todo.pop()
            if id(value) in seen or isinstance(value, _ATOMS):
                continue
            seen.add(id(value))
            self._alive.append(value)
            if id(value) in self._memo and isinstance(value, nn.Module | Tensor):
                self._reaches[id(start)] = True
                return True
            if not isinstance(value, nn.Module | Tensor):
                todo += inside(value)
        self._reaches.update(dict.fromkeys(seen, False))  # none of them leads there
        return False


def inside(value: Any) -> Iterable[Any]:
    """What an object leads to."""
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or () if _is_full(cell)]
        return [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values(), *vars(value).values()]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, weakref.ref):
        return [value()]
    if isinstance(value, dict):
        return list(value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    return list(vars(value).values()) if hasattr(value, "__dict__") else []


def writes_of(code: types.CodeType) -> set[str]:
    """The variables around a function that it assigns, in functions inside of it too."""
    names = {step.argval for step in dis.get_instructions(code) if step.opname in ("STORE_DEREF", "DELETE_DEREF")}
    inner = (constant for constant in code.co_consts if isinstance(constant, types.CodeType))
    return (names | {name for constant in inner for name in writes_of(constant)}) & {*code.co_freevars}


def _is_full(cell: types.CellType) -> bool:
    return cell != types.CellType()  # cells are compared by what they hold, and an empty one is like no other


def _function(value: types.FunctionType, rebind: _Rebind) -> Any:
    cells = tuple(rebind.cell(cell) for cell in value.__closure__ or ())
    fresh = types.FunctionType(value.__code__, value.__globals__, value.__name__, None, cells or None)
    rebind.keep(value, fresh)
    for mine, cell in zip(cells, value.__closure__ or (), strict=True):
        if _is_full(cell) and not _is_full(mine):
            mine.cell_contents = cell.cell_contents  # it may lead back to a function that shares the cell
            mine.cell_contents = rebind(cell.cell_contents)
    fresh.__defaults__ = rebind(value.__defaults__)
    fresh.__kwdefaults__ = rebind(value.__kwdefaults__)
    fresh.__qualname__, fresh.__module__, fresh.__doc__ = value.__qualname__, value.__module__, value.__doc__
    fresh.__annotations__ = value.__annotations__
    vars(fresh).update({name: rebind(inner) for name, inner in vars(value).items()})
    return fresh


def _mapping(value: Any, rebind: _Rebind) -> Any:
    fresh = copy.copy(value)
    rebind.keep(value, fresh)
    fresh.update({key: rebind(inner) for key, inner in value.items()})
    return fresh


def _list(value: list[Any], rebind: _Rebind) -> Any:
    fresh = copy.copy(value)
    rebind.keep(value, fresh)
    fresh[:] = [rebind(inner) for inner in value]
    return fresh


def _tuple(value: tuple[Any, ...], rebind: _Rebind) -> Any:
    inner = [rebind(item) for item in value]
    return type(value)(*inner) if hasattr(value, "_fields") else type(value)(inner)


_REBUILDS: tuple[tuple[Any, Callable[[Any, _Rebind], Any]], ...] = (
    (types.FunctionType, _function),
    (types.MethodType, lambda value, rebind: types.MethodType(rebind(value.__func__), rebind(value.__self__))),
    (
        functools.partial,
        lambda value, rebind: functools.partial(
            rebind(value.func),
            *(rebind(arg) for arg in value.args),
            **{key: rebind(value) for key, value in value.keywords.items()},
        ),
    ),
    (weakref.ref, lambda value, rebind: weakref.ref(rebind(value()))),
    (dict, _mapping),
    (list, _list),
    (tuple | set | frozenset, _tuple),
)

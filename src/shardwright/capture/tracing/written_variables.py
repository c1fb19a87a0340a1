"""Variables outside of modules that a forward writes to: a global counter, a list that it appends to.

A program writes to none of them. A variable that a trace has changed is harmless if it has the same value at the next
call (a warning that was given, a table that is filled once), which is seen by tracing again (export.py). One that has
tensors of the trace is refused: they have no values, and the next call would put nothing there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ...errors import CaptureError
from .variables import Variable

_CONTAINERS = (dict, list, tuple, set, frozenset, deque)
_MOST = 1_000


class WrittenVariables:
    """What variables are before a trace, to be compared with what they are after it."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._before = [(variable, *_mark(variable)) for variable in variables]

    def changed(self) -> list[Variable]:
        """Those that the trace has changed; refuses tensors that it has left in one."""
        variables = []
        for variable, _, before in self._before:
            value, now = _mark(variable)
            if now != before:
                if any(isinstance(inner, Tensor) and is_fake(inner) for inner in _inside(value)):
                    raise _refusal([variable], "stores a tensor of its call in it")
                variables.append(variable)
        return variables


def refuse_written(variables: Sequence[Variable]) -> CaptureError:
    """The refusal of a forward whose next call reads what this one has written."""
    return _refusal(variables, "changes it, and its next call reads it")


def _refusal(variables: Sequence[Variable], what: str) -> CaptureError:
    names = ", ".join(variable.name for variable in variables)
    return CaptureError(
        f"{names} is a variable outside of the model ({variables[0].place}), and the forward {what}; a program does "
        "the same at every call and writes to no variable. Return it from the forward, or make it a buffer "
        "(register_buffer) and write to it in place."
    )


def _mark(variable: Variable) -> tuple[Any, Any]:
    value = variable.look()[0]
    if isinstance(value, bool | int | float | complex | str | bytes):
        return value, (type(value), repr(value))
    return value, [id(inner) for inner in _inside(value)]


def _inside(value: Any) -> list[Any]:
    """A value and what is in it, in the containers of containers too."""
    values: list[Any] = []
    todo = [value]
    while todo and len(values) < _MOST:
        current = todo.pop()
        values.append(current)
        if isinstance(current, dict):
            todo += current.values()
        elif isinstance(current, _CONTAINERS):
            todo += current
    return values

"""Variables outside of modules that a forward writes to: a global counter, a list that it appends to.

A program writes to none of them. A variable that a trace has changed is harmless if the next call reads the same of it
and leaves it alone (a warning that was given, a table that is filled once), which is seen by tracing again
(export.py). One that has tensors of the trace is refused: they have no values, and the next call would put nothing
there. So is one that changes at every call, such as a counter.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from types import BuiltinMethodType, MethodType
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from ...errors import CaptureError
from ...frozen_values import freeze, inner_of, is_record
from .variables import Variable

_MOST = 1_000


class WrittenVariables:
    """What variables are before a trace, to be compared with what they are after it."""

    def __init__(self, variables: Iterable[Variable]) -> None:
        self._alive: dict[int, Any] = {}
        self._before = [(variable, freeze(_look(variable), self._alive)) for variable in variables]

    def changed(self) -> list[Variable]:
        """Those that the trace has changed; refuses tensors that it has left in one."""
        variables = []
        for variable, before in self._before:
            value = _look(variable)
            if freeze(value, self._alive) != before:
                if any(isinstance(inner, Tensor) and is_fake(inner) for inner in _inside(value)):
                    raise _refusal([variable], "stores a tensor of its call in it")
                variables.append(variable)
        return variables


def refuse_changing(variables: Sequence[Variable]) -> CaptureError:
    """The refusal of a forward that writes to a variable at every call."""
    return _refusal(variables, "changes it at every call")


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


def _look(variable: Variable) -> Any:
    """What a variable is; of a method that is called (`seen.append`), what it belongs to."""
    value = variable.look()[0]
    value = value.__self__ if isinstance(value, MethodType | BuiltinMethodType) else value
    return None if is_record(value) and _is_installed(type(value)) else value


def _is_installed(kind: type) -> bool:
    """Whether a class is of a library: its objects may note what they like."""
    file = getattr(sys.modules.get(kind.__module__), "__file__", None) or ""
    return "site-packages" in file


def _inside(value: Any) -> list[Any]:
    """A value and what is in it, in the containers of containers and in the attributes of objects too."""
    values: list[Any] = []
    todo = [value]
    while todo and len(values) < _MOST:
        current = todo.pop()
        values.append(current)
        for part in inner_of(current):
            todo += part.values() if isinstance(part, dict) else part
    return values

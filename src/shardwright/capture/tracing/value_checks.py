"""Checks of what is in a tensor, taken to have passed.

`assert torch.all(ids >= 0).item()` and `if labels.max() >= size: raise ...` decide by values,
which a trace does not have. But a program that continues after them is one for which they
passed, so that is what is traced. The check itself is not in the graph; a note tells the user.
"""

from __future__ import annotations

import ast
import linecache
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
from torch.distributions import Distribution
from torch.overrides import TorchFunctionMode

_TORCH = os.path.dirname(torch.__file__) + os.sep
_INSIDE = (_TORCH, os.path.dirname(os.path.dirname(__file__)) + os.sep)
_MODELS = os.path.join(_TORCH, "nn") + os.sep  # which checks values as a user's model does


class PassedChecks(TorchFunctionMode):
    """Within this, the condition of a check has the value with which the program continues."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[tuple[str, int], None] = {}

    def notes(self) -> tuple[str, ...]:
        return tuple(
            f"a check of values is taken to pass and is not in the program: {os.path.basename(path)}:{line}"
            for path, line in self.seen
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **(kwargs or {}))
        if isinstance(func, FunctionType) and _has_checks(func.__code__):  # its inside would not be seen by a mode
            with self:
                return _unseen(func)(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__bool__" or (name == "item" and args[0].dtype is torch.bool):
            frame = _user_frame(sys._getframe(1))
            passed = _checks(frame.f_code.co_filename).get(frame.f_lineno) if frame is not None else None
            if frame is not None and passed is not None:
                self.seen[frame.f_code.co_filename, frame.f_lineno] = None
                return passed
        return func(*args, **(kwargs or {}))


@contextmanager
def unvalidated() -> Iterator[None]:
    """Distributions of torch look at the values of what they are made of, and by default at all of them."""
    before = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(before)


@lru_cache(maxsize=256)
def _has_checks(code: CodeType) -> bool:
    """Whether a function of torch.nn has a check of ours in it."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    path = code.co_filename
    return path.startswith(_MODELS) and any(min(lines) <= line <= max(lines) for line in _value_checks(path))


@lru_cache(maxsize=64)
def _value_checks(path: str) -> tuple[int, ...]:
    """The lines of checks in a file that depend on values of tensors, not on shapes or strings."""
    asks = re.compile(r"\.(any|all)\(")
    return tuple(line for line in _checks(path) if asks.search(linecache.getline(path, line)))


def _unseen(func: FunctionType) -> FunctionType:
    """The same function, not intercepted by modes."""
    names = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")
    inside = {**func.__globals__, **dict.fromkeys(names, lambda *_: False)}
    copied = FunctionType(func.__code__, inside, func.__name__, func.__defaults__, func.__closure__)
    copied.__kwdefaults__ = func.__kwdefaults__
    return copied


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None:
        path = frame.f_code.co_filename
        if not path.startswith(_INSIDE) or path.startswith(_MODELS):
            break
        frame = frame.f_back
    return frame


@lru_cache(maxsize=256)
def _checks(path: str) -> dict[int, bool]:
    """The lines of a file with conditions of checks that negate nothing, and what these have to come to."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return {}
    conditions: dict[int, bool] = {}
    for node in ast.walk(tree):
        raises = isinstance(node, ast.If) and not node.orelse and isinstance(node.body[0], ast.Raise)
        if not raises and not isinstance(node, ast.Assert):
            continue
        test: ast.expr = node.test  # type: ignore[attr-defined]
        if not any(isinstance(part, ast.Not) for part in ast.walk(test)):
            lines = range(test.lineno, (test.end_lineno or test.lineno) + 1)
            conditions.update(dict.fromkeys(lines, isinstance(node, ast.Assert)))
    return conditions

"""Asserts about what is in a tensor, taken as true.

`assert torch.all(ids >= 0).item()` decides by values, which a trace does not have. But a
program that goes on after the line is one for which it held, so that is what is traced. The
check itself is not in the graph.
"""

from __future__ import annotations

import ast
import linecache
import os
import sys
from functools import lru_cache
from types import FrameType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

_INSIDE = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


class HeldAsserts(TorchFunctionMode):
    """Within this, a tensor that an assert asks for its truth is true."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__bool__" or (name == "item" and args[0].dtype is torch.bool):
            frame = _user_frame(sys._getframe(1))
            if frame is not None and frame.f_lineno in _asserted(frame.f_code.co_filename):
                return True
        return func(*args, **(kwargs or {}))


def _user_frame(frame: FrameType | None) -> FrameType | None:
    while frame is not None and frame.f_code.co_filename.startswith(_INSIDE):
        frame = frame.f_back
    return frame


@lru_cache(maxsize=256)
def _asserted(path: str) -> frozenset[int]:
    """The lines of a file that belong to the condition of an assert which negates nothing."""
    try:
        tree = ast.parse("".join(linecache.getlines(path)))
    except SyntaxError:
        return frozenset()
    found: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and not any(isinstance(held, ast.Not) for held in ast.walk(node.test)):
            found.update(range(node.test.lineno, (node.test.end_lineno or node.test.lineno) + 1))
    return frozenset(found)

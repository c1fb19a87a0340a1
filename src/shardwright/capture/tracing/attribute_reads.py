"""Which attributes of its modules a trace reads: what a program has as constants.

A number, a flag, a list or a config that a forward reads is fixed in the graph. Whoever runs the
program has to know which they were, so that a change of one is seen and a change of any other costs nothing.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Reads = frozenset[tuple[str, str]]
"""(the path of a module, the name of an attribute)."""

ALL = "*"
"""In the place of a name: all attributes that the module has."""

_INSIDE = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep,
)
_SKIPPED = (frozenset(vars(nn.Module())) | frozenset(dir(nn.Module))) - {"__dict__"}  # what every module has and does


@dataclass(frozen=True, slots=True)
class _Listener:
    paths: dict[int, str]  # by the id of a module's dict, which a proxy of it has too
    seen: set[tuple[str, str]]


_LISTENERS: dict[int, _Listener] = {}  # by thread
_CHANGING = threading.Lock()


@contextmanager
def reading(module: nn.Module) -> Iterator[set[tuple[str, str]]]:
    """Within this, attributes of a module and its parts that this thread reads are put down.

    All that a module has by being one (hooks, submodules, parameters, training) is not: others look after those.
    """
    listener = _Listener({id(vars(part)): path for path, part in module.named_modules()}, set())
    kind: Any = nn.Module
    with _CHANGING:
        _LISTENERS[threading.get_ident()] = listener
        kind.__getattribute__ = _get
    try:
        yield listener.seen
    finally:
        with _CHANGING:
            del _LISTENERS[threading.get_ident()]
            if not _LISTENERS:
                del kind.__getattribute__


def _get(self: Any, name: str, plain: Any = object.__getattribute__) -> Any:
    if name in _SKIPPED or torch.compiler.is_dynamo_compiling():  # which captures cond and scan, and would look in here
        return plain(self, name)
    listener = _LISTENERS.get(threading.get_ident())
    path = listener.paths.get(id(plain(self, "__dict__"))) if listener else None
    if listener is not None and path is not None:
        if name != "__dict__":
            listener.seen.add((path, name))
        elif not sys._getframe(1).f_code.co_filename.startswith(_INSIDE):
            listener.seen.add((path, ALL))
    return plain(self, name)


def everything(module: nn.Module, below: str = "") -> Reads:
    """All attributes of a module's parts, or of those below a path: for what was not watched."""
    lead = f"{below}." if below else ""
    paths = (path for path, _ in module.named_modules())
    return frozenset((path, ALL) for path in paths if path == below or path.startswith(lead))

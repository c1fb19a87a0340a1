"""A room of the package loaded with one of its files changed, beside the real one."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import shardwright


class _Text(importlib.abc.InspectLoader, importlib.abc.MetaPathFinder):
    """Finds one module, and loads it from a text."""

    def __init__(self, name: str, text: str) -> None:
        self.name, self.text = name, text

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.util.spec_from_loader(fullname, self) if fullname == self.name else None

    def get_source(self, fullname: str) -> str:
        return self.text


@contextmanager
def changed_room(file: str, text: str) -> Iterator[Any]:
    """The room that a file is of, with another text of that file. No other room may have been loaded with it."""
    room = f"shardwright.{file.split('/')[0]}"
    kept = {name: sys.modules.pop(name) for name in _modules(room)}
    finder = _Text("shardwright." + file.removesuffix(".py").replace("/", "."), text)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module(room)
    finally:
        sys.meta_path.remove(finder)
        for name in _modules(room):
            del sys.modules[name]
        sys.modules.update(kept)
        setattr(shardwright, room.split(".")[1], kept[room])


def _modules(room: str) -> list[str]:
    return [name for name in sys.modules if name == room or name.startswith(f"{room}.")]

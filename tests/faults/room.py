"""The emitter loaded with one of its files changed, beside the real one."""

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
from shardwright.rules import registry


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
def changed_emitter(file: str, text: str) -> Iterator[Any]:
    """The emitter with another text of one of its files, or of a file of the ops that it prints."""
    rooms = ["shardwright.emit", *(["shardwright.ops"] if file.startswith("ops/") else [])]
    kept = {name: sys.modules.pop(name) for room in rooms for name in _modules(room)}
    rules, keyed = dict(registry._TABLE), set(registry.KEYED)  # ops that are loaded again define theirs again
    finder = _Text("shardwright." + file.removesuffix(".py").replace("/", "."), text)
    sys.meta_path.insert(0, finder)
    try:
        yield importlib.import_module("shardwright.emit")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for room in rooms for name in _modules(room)]:
            del sys.modules[name]
        sys.modules.update(kept)
        for room in rooms:
            setattr(shardwright, room.split(".")[1], kept[room])
        registry._TABLE.update(rules)
        registry.KEYED.clear()
        registry.KEYED.update(keyed)


def _modules(room: str) -> list[str]:
    return [name for name in sys.modules if name == room or name.startswith(f"{room}.")]

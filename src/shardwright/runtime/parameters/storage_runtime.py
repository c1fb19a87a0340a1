"""The runtime classes of kinds of parameter storage, which those name, since they are defined without torch."""

from __future__ import annotations

from importlib import import_module
from typing import TypeVar

from shardwright.errors import RankError
from shardwright.storage import Storage

Runtime = TypeVar("Runtime")


def runtime_class(storage: Storage, base: type[Runtime]) -> type[Runtime]:
    """The class that a storage names as its runtime, which has to be a `base`."""
    module, _, name = storage.runtime.partition(":")
    chosen = getattr(import_module(module), name)
    if not (isinstance(chosen, type) and issubclass(chosen, base)):
        raise RankError(f"{storage.title} names {storage.runtime} as its runtime, which is no {base.__name__}")
    return chosen

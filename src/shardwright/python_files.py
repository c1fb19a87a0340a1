"""Functions that people name by a file or a module: train.py:make_model, mine.policies:megatron."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .errors import InputError


def find_function(text: str, form: str) -> Callable[..., Any]:
    """The function that a text names. `form`: what may be written, for errors."""
    where, colon, name = text.rpartition(":")
    if not colon or not where or not name:
        raise InputError(f"{text!r} does not name {form}")
    module = import_file(Path(where)) if where.endswith(".py") else import_module(where)
    function = getattr(module, name, None)
    if not callable(function):
        known = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise InputError(f"{where} has no function {name!r}; it has {', '.join(known) or 'none'}")
    result: Callable[..., Any] = function
    return result


def import_file(path: Path) -> Any:
    if not path.is_file():
        raise InputError(f"there is no file {path}")
    name = path.stem
    loaded = sys.modules.get(name)
    if loaded is not None and Path(getattr(loaded, "__file__", None) or "").resolve() == path.resolve():
        return loaded
    if loaded is not None or not name.isidentifier():
        name = f"shardwright_model_{abs(hash(path.resolve()))}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # generated code imports the model's functions from it
    sys.path.insert(0, str(path.resolve().parent))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(path.resolve().parent))
    return module


def import_module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise InputError(f"there is no module {name!r} ({error}); for a file write its path, ending in .py") from error

"""Functions of somebody else's, found by a path and replaced wherever modules have them."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Callable
from typing import Any

from ...errors import RuleError
from .callee import REGISTERED

_PATH = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")


def is_path(text: str) -> bool:
    """Whether a text is a path such as "package.module:function"; a rule never has a colon."""
    return _PATH.fullmatch(text) is not None


def replace_at(path: str, make: Callable[[Any], Any]) -> Any:
    """Put what `make` makes of a function in its place, in its module and in those that have imported it by name."""
    if not is_path(path):
        raise RuleError(f"{path!r} is no path of a function; write it as 'package.module:function'")
    name, _, attribute = path.partition(":")
    try:
        holder: Any = importlib.import_module(name)
        *outer, last = attribute.split(".")
        for part in outer:
            holder = getattr(holder, part)
        original = getattr(holder, last)
    except (ImportError, AttributeError) as error:
        raise RuleError(f"{path} can't be registered: {error}") from error
    replacement = make(getattr(original, REGISTERED, original))
    if replacement is not original:
        for module in list(sys.modules.values()):
            for key in [key for key, value in vars(module).items() if value is original] if module is not None else []:
                setattr(module, key, replacement)
        setattr(holder, last, replacement)
    return replacement

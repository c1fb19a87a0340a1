"""Constraints in a YAML file, as plain data."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ..errors import PlanError
from ..formats import StrictLoader, read_yaml


def load_entries(path: str | Path) -> Any:
    """The entries of a file."""
    if not str(path).endswith((".yaml", ".yml")):
        raise PlanError(f"constraints={str(path)!r} is not a YAML file; its name should end in .yaml")
    return read_yaml(path, PlanError, _Loader) or []


def show_entry(value: Any) -> str:
    """An entry on one line, as a person would write it."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {show_entry(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(show_entry, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


class _Loader(StrictLoader):
    """YAML in which true and false are the only truths: `on` and `no` are words."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in StrictLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"(?:true|false)$"), list("tf"))

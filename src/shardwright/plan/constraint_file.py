"""Constraints in a YAML file, as plain data."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml  # type: ignore[import-untyped]

from ..cluster.file import StrictLoader
from ..errors import PlanError


def load_entries(path: str | Path) -> Any:
    """The entries of a file."""
    if not str(path).endswith((".yaml", ".yml")):
        raise PlanError(f"constraints={str(path)!r} is not a YAML file; its name should end in .yaml")
    try:
        return yaml.load(Path(path).read_text(encoding="utf-8"), Loader=_Loader) or []
    except OSError as error:
        raise PlanError(f"{path} can't be read: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} is not YAML: {error}") from error


class _Loader(StrictLoader):
    """YAML in which true and false are the only truths: `on` and `no` are words."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: [pair for pair in pairs if pair[0] != "tag:yaml.org,2002:bool"]
        for first, pairs in StrictLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:bool", re.compile(r"true|false"), list("tf"))

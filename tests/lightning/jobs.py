"""What ranks do in the tests of the strategy: runs in a pool of gloo processes."""

from __future__ import annotations

from typing import Any

from . import modules
from .modules import compiled


def fit(rank: int, name: str, plan: str, size: int, options: dict[str, Any]) -> Any:
    return compiled(getattr(modules, name), plan, size, **options)

"""Options of tests, in their groups: helpers take them flat, whatever group they are in."""

from typing import Any

from shardwright.options import MOVED
from shardwright.train.options import MOVED_IN_TRAINER


def grouped(**options: Any) -> dict[str, Any]:
    """Arguments of `parallelize`, `plan`, `verify` and `rehearse`: `outputs="scalars"` goes into `compile`."""
    return _grouped(options, MOVED)


def grouped_for_trainer(**options: Any) -> dict[str, Any]:
    """Arguments of `Trainer`: `clip_norm=1.0` goes into `optimization`."""
    return _grouped(options, MOVED_IN_TRAINER)


def _grouped(options: dict[str, Any], places: dict[str, str]) -> dict[str, Any]:
    arguments: dict[str, Any] = {}
    for name, value in options.items():
        group, _, field = places.get(name, "").partition(".")
        if not group:
            arguments[name] = value
        else:
            arguments[group] = {**arguments.get(group, {}), field: value}
    return arguments

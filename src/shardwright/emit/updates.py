"""Where buffers, and parameters that forward writes to, get their new values."""

from __future__ import annotations

from ..ir.paths import numbered_layer
from ..lower import LoweredProgram


def place_updates(program: LoweredProgram) -> tuple[dict[str, tuple[str, ...]], list[tuple[str, str]]]:
    """The keys of values that are written where they are made, and (key, value) of what waits for the end of forward.

    A layer writes to its own buffers only, so that layers that do the same have the same text.
    """
    makers = {name: op for op in program.body for name in op.outputs}
    keys: dict[str, tuple[str, ...]] = {}
    late: list[tuple[str, str]] = []
    for key, value in program.updates:
        layer = numbered_layer(makers[value].module_path) if value in makers else None
        if value in makers and (layer is None or numbered_layer(key) == layer):
            keys[value] = (*keys.get(value, ()), key)
        else:
            late.append((key, value))
    return keys, late

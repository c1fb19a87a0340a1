"""Ops that are calls of the user's own Python: opaque submodules, branches and loops over data.

They have no rule, and so run whole on every device, except for an opaque submodule that is
said to have independent rows (dim 0 of what it takes and returns may be split) and a layer
of experts, which brings its rule along.
"""

from __future__ import annotations

from .registry import OpCall, letters, rule

OPAQUE = "call.opaque"
COND, SCAN, WHILE = "call.cond", "call.scan", "call.while_loop"


@rule(OPAQUE)
def _opaque(call: OpCall) -> str | None:
    if call.op.argument("rule"):
        return str(call.op.argument("rule"))
    if not call.op.argument("batch"):
        return None
    rows = call.outputs[0].shape[0]
    arguments = len(call.op.argument("tensors"))
    inputs = [
        _rows(value.shape, f"i{at}") if at < arguments and value.shape[:1] == (rows,) else "?"
        for at, value in enumerate(call.inputs)
    ]
    return f"{', '.join(inputs)} -> {', '.join(_rows(out.shape, f'o{at}') for at, out in enumerate(call.outputs))}"


def _rows(shape: tuple[int, ...], prefix: str) -> str:
    """Dim 0 may be split, the others not."""
    return " ".join(["b", *(f"{label}^" for label in letters(len(shape) - 1, prefix))])

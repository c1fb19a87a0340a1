"""What stands behind a line of generated code: the shape of what it makes, and what its name does not say."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Op
from ..layout import MB
from ..lower import LoweredProgram, reshard_kind
from .sizes import SizeNames

BEYOND_THE_CALL = {
    "replicate": "backward sums d{x} over {axes}",
    "all_reduce_to_r": "backward sums d{x} over {axes}",
    "all_gather_to_r": "backward reduce-scatters d{x} over {axes}",
    "zero_pad": "zeros where other ranks of {axes} have their shards",
    "partial": "zeros but on the first rank of {axes}",
    "invariant": "backward keeps d{x} of the first rank of {axes}",
}
"""What reshards do that their calls don't say."""


def comment_on(op: Op, inputs: Mapping[int, str], source: str, program: LoweredProgram, sizes: SizeNames) -> str:
    """The comment of the line of an op."""
    if op.target == "runtime.begin_count":
        return "the labels that count, summed while the model runs"
    shape = shape_of(op.outputs[0], program, sizes)
    layout = program.layouts.get(op.outputs[0])
    kind = reshard_kind(op)
    if kind in ("shard", "shard_from_r") and op.argument("axes") == (MB,):
        shape += " of this microbatch"
    elif kind is not None and (kind in BEYOND_THE_CALL or not op.target.startswith("comm.")):
        text = BEYOND_THE_CALL.get(kind, BEYOND_THE_CALL["replicate"])
        shape += "; " + text.format(x=inputs[0], axes=", ".join(op.argument("axes")))
    elif layout is not None and kind is None:
        partial = [name for name, placement in layout.rest if str(placement).startswith("partial")]
        shape += f", a partial sum over {', '.join(partial)}" if partial else ""
    return f"{shape}{'  ' + source if source and not op.target.startswith('comm.') else ''}"


def shape_of(name: str, program: LoweredProgram, sizes: SizeNames) -> str:
    """The local shape of a value, in the names of sizes."""
    if name.endswith("@sum") or name.startswith("count@"):
        return "[]"
    return f"[{', '.join(sizes.text(size).replace(' ', '') for size in program.sizes_of(name))}]"

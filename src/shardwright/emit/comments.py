"""What stands behind a line of generated code: the shape of what it makes, or what a reshard sends."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Op
from ..layout import MB
from ..lower import LoweredProgram, reshard_kind
from .sizes import SizeNames

SHOWN = {
    "all_reduce": "sums {x} over {axes}",
    "replicate": "backward sums d{x} over {axes}",
    "all_reduce_to_r": "sums {x} over {axes}, and d{x} in backward",
    "all_gather": "all of {x} over {axes}",
    "all_gather_to_r": "all of {x} over {axes}; backward sums d{x} and keeps this rank's share",
    "shard": "this rank's share over {axes}",
    "shard_from_r": "this rank's share over {axes}",
    "reduce_scatter": "sums {x} over {axes} and keeps this rank's share",
    "zero_pad": "zeros where other ranks of {axes} have their share",
    "all_to_all": "all_to_all over {axes}",
    "partial": "counted once over {axes}",
    "invariant": "its gradient is counted once over {axes}",
    "reduce": "over {axes}",
}


def comment_on(op: Op, inputs: Mapping[int, str], source: str, program: LoweredProgram, sizes: SizeNames) -> str:
    """The comment of the line of an op."""
    kind = reshard_kind(op)
    if kind is not None and op.target.startswith("comm."):
        if op.argument("axes") == (MB,) and kind in ("shard", "shard_from_r"):
            return "this microbatch's share"
        return SHOWN[kind].format(x=inputs[0], axes=", ".join(op.argument("axes")))
    if op.target == "runtime.begin_count":
        return "of labels, summed meanwhile"
    shape = shape_of(op.outputs[0], program, sizes)
    if kind is not None:
        shape += f"; backward sums d{inputs[0]} over {', '.join(op.argument('axes'))}"
    partial = [name for name, placement in program.layouts[op.outputs[0]].rest if str(placement).startswith("partial")]
    return f"{shape}{', a partial sum over ' + ', '.join(partial) if partial else ''}{'  ' + source if source else ''}"


def shape_of(name: str, program: LoweredProgram, sizes: SizeNames) -> str:
    """The local shape of a value, in the names of sizes."""
    if name.endswith("@sum") or name.startswith("count@"):
        return "[]"
    return f"[{', '.join(sizes.text(size).replace(' ', '') for size in program.sizes_of(name))}]"

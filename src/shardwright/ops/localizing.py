"""What local forms of ops share: the axes that shard a value, and shards as algorithms want them.

Sizes are never edited as numbers: they are made anew from the atoms of the op's local outputs. A size that is read as
a number (the divisor of a mean) stays the whole one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import LoweringError
from ..ir import Op, Slot
from ..layout import Layout, Shard, join_shards
from .contexts import ProgramOnRank


def split_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    return tuple(shard.axis for shard in layout.shards[dim])


def cut_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(shard.axis for shards in layout.shards for shard in shards)


def in_mesh_order(program: ProgramOnRank, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in program.mesh.names if axis in axes)


def splits(layout: Layout) -> tuple[tuple[int, Shard], ...]:
    """(dim, shard) for every shard, major to minor."""
    return tuple((dim, shard) for dim, shards in enumerate(layout.shards) for shard in shards)


def one_cut(program: ProgramOnRank, op: Op, what: str, shards: Sequence[Shard]) -> tuple[tuple[str, ...], Shard]:
    """The axes that shard a dim, and their shards as one over the product of these axes, as an algorithm wants it."""
    axes = tuple(shard.axis for shard in shards)
    joined = shards[0] if len(shards) == 1 else join_shards(shards, program.mesh.sizes)
    if joined is None:
        raise LoweringError(
            f"{op}: {what} can't be split by {' and '.join(axes)} at once; split them on one axis, or on axes that "
            "divide them evenly one after the other"
        )
    return axes, joined


def divided(op: Op, count: int) -> tuple[Op, ...]:
    """The op, and then its result over a number."""
    (out,) = op.outputs
    inner = f"{out}@sum"
    total = replace(op, outputs=(inner,))
    share = Op(
        name=f"{op.name} share",
        target="aten.div.Scalar",
        inputs=(inner,),
        outputs=(out,),
        arguments=(("self", Slot(0)), ("other", count)),
        source=op.source,
        module_path=op.module_path,
        region=op.region,
        autocast=op.autocast,
        no_grad=op.no_grad,
    )
    return total, share


def local_size(program: ProgramOnRank, op: Op) -> Op:
    """The sizes of a view are those of its local result."""
    name = next(key for key in ("size", "shape") if op.argument(key) is not None)
    return op.with_arguments(**{name: program.sizes_of(op.outputs[0])})

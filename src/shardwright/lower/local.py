"""Local sizes and algorithms: what an op's arguments become on a rank.

Sizes are never edited as numbers: they are said anew from the atoms of the op's local
outputs. A size that is read as a number (the divisor of a mean) stays the whole one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from ..errors import LoweringError
from ..ir import Op
from ..ir.graph import Slot
from ..layout import Layout, Shard, join_shards
from ..plan.pipeline import MB
from ..rules import DROPOUTS
from ..rules.user_calls import OPAQUE
from .custom_ops import localize_custom
from .program import LoweredProgram, sizes_of

Localizer = Callable[[LoweredProgram, Op], "Op | tuple[Op, ...]"]
_TABLE: dict[str, Localizer] = {}

COUNTED = ("runtime.cross_entropy", "runtime.nll_loss")
"""Losses whose mean divides by a count of labels."""


def local(*targets: str) -> Callable[[Localizer], Localizer]:
    def register(function: Localizer) -> Localizer:
        for target in targets:
            _TABLE[target if "." in target else f"aten.{target}.default"] = function
        return function

    return register


def localize(program: LoweredProgram) -> LoweredProgram:
    """Rewrite every op of the body for local shapes."""
    values, layouts = dict(program.values), dict(program.layouts)
    body: list[Op] = []
    for op in program.body:
        function = _TABLE.get(op.target)
        if function is None:
            body.append(localize_custom(program, op))
            continue
        localized = function(program, op)
        for new in localized if isinstance(localized, tuple) else (localized,):
            for name in new.outputs:
                if name not in values:  # a local sum before its division: laid out as the result
                    values[name] = replace(values[op.outputs[0]], name=name)
                    layouts[name] = layouts[op.outputs[0]]
            body.append(new)
    return program.with_(body=tuple(body), values=values, layouts=layouts)


def split_axes(layout: Layout, dim: int) -> tuple[str, ...]:
    return tuple(shard.axis for shard in layout.shards[dim])


def cut_axes(layout: Layout) -> tuple[str, ...]:
    return tuple(shard.axis for shards in layout.shards for shard in shards)


@local("view", "reshape", "_unsafe_view", "view_copy", "_reshape_copy", "expand", "expand_copy", "broadcast_to")
def sized(program: LoweredProgram, op: Op) -> Op:
    name = next(key for key in ("size", "shape") if op.argument(key) is not None)
    return op.with_arguments(**{name: sizes_of(program, op.outputs[0])})


@local("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def normalized(program: LoweredProgram, op: Op) -> Op:
    width = len(op.argument("normalized_shape"))
    return op.with_arguments(normalized_shape=sizes_of(program, op.outputs[0])[-width:])


@local("aten.unflatten.int")
def unflatten(program: LoweredProgram, op: Op) -> Op:
    dim = op.argument("dim", 0) % len(program.values[op.inputs[0]].shape)
    return op.with_arguments(sizes=sizes_of(program, op.outputs[0])[dim : dim + len(op.argument("sizes"))])


@local("aten.split.Tensor", "split_with_sizes")
def split(program: LoweredProgram, op: Op) -> Op:
    dim = op.argument("dim", 0) % len(program.values[op.inputs[0]].shape)
    parts = tuple(sizes_of(program, name)[dim] for name in op.outputs)
    if op.argument("split_size") is None:
        return op.with_arguments(split_sizes=parts)
    if all(shard.even(program.mesh.sizes[shard.axis]) for shard in program.layouts[op.inputs[0]].shards[dim]):
        return op.with_arguments(split_size=parts[0])
    arguments = tuple(("split_sizes", parts) if key == "split_size" else (key, value) for key, value in op.arguments)
    # an empty piece has no size to step by
    return replace(op, target="aten.split_with_sizes.default", arguments=arguments)


@local("aten.slice.Tensor")
def slice_(program: LoweredProgram, op: Op) -> Op:
    """One of n equal parts keeps its place among the parts; other slices are on dims that are whole."""
    rank = len(program.values[op.inputs[0]].shape)
    dim = op.argument("dim", 0) % rank
    before = program.values[op.inputs[0]].shape[dim]
    after = program.values[op.outputs[0]].shape[dim]
    if not program.layouts[op.inputs[0]].shards[dim] or before == after:
        if before == after:
            return op.with_arguments(start=None, end=None)
        return op
    start = op.argument("start", 0) or 0
    part = ((start + before) if start < 0 else start) // after
    unit = sizes_of(program, op.outputs[0])[dim]
    return op.with_arguments(start=unit.times(part) if part else 0, end=unit.times(part + 1))


@local("aten.mean.default", "aten.mean.dim")
def mean(program: LoweredProgram, op: Op) -> Op | tuple[Op, ...]:
    """A mean over a split dim is a share: the local sum over the whole count."""
    source = program.layouts[op.inputs[0]]
    rank = len(source.shards)
    reduced = op.argument("dim")
    dims = tuple(range(rank)) if reduced in (None, ()) or not rank else tuple(d % rank for d in reduced)
    if not any(source.shards[dim] for dim in dims):
        return op
    count = 1
    for dim in dims:
        count *= program.values[op.inputs[0]].shape[dim]
    target = op.target.replace("mean", "sum")
    if target == "aten.sum.dim":
        target = "aten.sum.dim_IntList"
    return _divided(replace(op, target=target), count)


def _divided(op: Op, count: int) -> tuple[Op, ...]:
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


@local("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy", "soft_margin_loss", "kl_div",
       "binary_cross_entropy_with_logits", "poisson_nll_loss", "hinge_embedding_loss", "margin_ranking_loss",
       "cosine_embedding_loss", "triplet_margin_loss", "multi_margin_loss", "multilabel_margin_loss")  # fmt: skip
def loss(program: LoweredProgram, op: Op) -> Op | tuple[Op, ...]:
    """A mean over split elements, or rows, is the local sum over their whole number."""
    split = any(cut_axes(program.layouts[name]) for name in op.inputs)
    if op.argument("reduction", 1) != 1 or not split:
        return op
    signature = program.analysis.signatures[op.name]
    assert signature.rule is not None
    atoms = program.analysis.atoms
    count = math.prod(atoms.product(signature.labels[label]) for label in signature.rule.sums)
    return _divided(op.with_arguments(reduction=2), count)


@local("embedding")
def embedding(program: LoweredProgram, op: Op) -> Op:
    weight = program.layouts[op.inputs[0]]
    if not weight.shards[0]:
        return op
    axes, shard = one_cut(program, op, "the rows of a table", weight.shards[0])
    return replace(op, target="runtime.embedding_rows").with_arguments(
        axes=axes, sharding=shard, rows=program.values[op.inputs[0]].shape[0]
    )


def one_cut(program: LoweredProgram, op: Op, what: str, shards: Sequence[Shard]) -> tuple[tuple[str, ...], Shard]:
    """The axes that cut a dim, and their cuts as one over the product of these axes, as an algorithm wants it."""
    axes = tuple(shard.axis for shard in shards)
    joined = shards[0] if len(shards) == 1 else join_shards(shards, program.mesh.sizes)
    if joined is None:
        raise LoweringError(
            f"{op}: {what} can't be split by {' and '.join(axes)} at once; split them on one axis, or on axes that "
            "divide them evenly one after the other"
        )
    return axes, joined


@local("aten.cross_entropy_loss.default")
def cross_entropy(program: LoweredProgram, op: Op) -> Op:
    logits = program.layouts[op.inputs[0]]
    at = 1 if len(logits.shards) > 1 else 0
    classes = logits.shards[at]
    rows = tuple(axis for dim in range(len(logits.shards)) if dim != at for axis in split_axes(logits, dim))
    if not classes and (not rows or op.argument("reduction", 1) != 1):
        return op
    result = replace(op, target="runtime.cross_entropy").with_arguments(rows=_in_mesh_order(program, rows))
    if classes:
        total = program.values[op.inputs[0]].shape[at]
        axes, shard = one_cut(program, op, "classes", classes)
        result = result.with_arguments(classes=axes, sharding=shard, size=total)
    return result


def _in_mesh_order(program: LoweredProgram, axes: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(axis for axis in program.mesh.names if axis in axes)


@local("aten.nll_loss_nd.default", "aten.nll_loss.default")
def nll_loss(program: LoweredProgram, op: Op) -> Op:
    rows = _in_mesh_order(program, cut_axes(program.layouts[op.inputs[1]]))
    if not rows or op.argument("reduction", 1) != 1:
        return op
    return replace(op, target="runtime.nll_loss").with_arguments(rows=rows)


@local("batch_norm", "_native_batch_norm_legit_functional", "aten._native_batch_norm_legit.no_stats")
def batch_norm(program: LoweredProgram, op: Op) -> Op:
    """In training always the runtime's: it gives the new statistics, and sums them where rows are split."""
    training = op.argument("training", "no_training" not in op.target)
    if not training:
        return op
    axes = _in_mesh_order(program, split_axes(program.layouts[op.inputs[0]], 0))
    outputs = (op.outputs[0], *op.outputs[3:])  # the two between are what torch's own backward would save
    return replace(op, target="runtime.batch_norm", outputs=outputs).with_arguments(axes=axes)


@local(*DROPOUTS)
def dropout(program: LoweredProgram, op: Op) -> Op:
    """Masks are drawn by the op's key and the coordinates on the axes that split the value."""
    splits = _splits(program.layouts[op.outputs[0]])
    return replace(op, target="runtime.dropout").with_arguments(op_key=op.name, splits=splits)


@local(OPAQUE)
def opaque(program: LoweredProgram, op: Op) -> Op:
    """Where its rows are split, a part draws other random numbers on every rank; split experts are found by theirs."""
    split = [axis for axis in cut_axes(program.layouts[op.outputs[0]]) if axis != MB]  # microbatches differ anyway
    axes = _in_mesh_order(program, tuple(split))
    op = op.with_arguments(axes=axes) if axes else op
    stacked = [program.layouts[op.inputs[slot.index]].shards for slot in op.argument("held")]
    storage_options = [shards[0] for shards in stacked if shards and shards[0]] if op.argument("rule") else []
    if not storage_options:
        return op
    if len(storage_options[0]) > 1:
        raise LoweringError(f"{op}: experts can be split on one axis only")
    (shard,) = storage_options[0]
    return replace(op, target="runtime.experts").with_arguments(home=(shard.axis,), sharding=shard)


@local("scaled_dot_product_attention")
def attention(program: LoweredProgram, op: Op) -> Op:
    if not op.argument("dropout_p", 0.0):
        return op
    splits = _splits(program.layouts[op.outputs[0]])
    return replace(op, target="runtime.attention").with_arguments(op_key=op.name, splits=splits)


def _splits(layout: Layout) -> tuple[tuple[int, Shard], ...]:
    """(dim, cut) for every cut, major to minor."""
    return tuple((dim, shard) for dim, shards in enumerate(layout.shards) for shard in shards)

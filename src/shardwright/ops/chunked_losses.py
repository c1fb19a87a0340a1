"""A linear and the cross entropy of its logits as one call of the runtime, and the ops that it may stand for.

`lower/loss_head.py` finds them, and `lower/chunked_loss.py` joins them.
"""

from __future__ import annotations

from typing import Any

from ..ir import Op
from .contexts import RankRun, RuntimeArguments
from .losses import MEAN, SMOOTHED, reduction_of
from .printing import REDUCTIONS, Printing, axes_text, plain
from .spec import define

CHUNKED = "runtime.linear_cross_entropy"

# -- the ops between a linear and its loss

LOSSES = ("aten.cross_entropy_loss.default", "runtime.cross_entropy")
LOGSUMEXPS = ("aten.logsumexp.default", "runtime.logsumexp")
LINEAR, ADD, ADDED_MATMUL = "aten.linear.default", "aten.add.Tensor", "aten.addmm.default"
MATMULS = (LINEAR, ADDED_MATMUL, "aten.matmul.default", "aten.mm.default")
VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
COPIES = ("aten.clone.default", "aten.contiguous.default")
TURNS = ("aten.transpose.int", "aten.permute.default", "aten.t.default")
SLICE = "aten.slice.Tensor"
SLICE_ARGUMENTS = (("dim", 0), ("start", 0), ("end", 2**63 - 1), ("step", 1))
SCALED = {"aten.mul.Tensor": "mul", "aten.div.Tensor": "div", "aten.mul.Scalar": "mul", "aten.div.Scalar": "div"}


def elementwise_step(op: Op) -> tuple[Any, ...] | None:
    """A cast, a scale or a tanh as the runtime names it; None for other ops."""
    if op.target == "aten._to_copy.default" and {name for name, _ in op.arguments} <= {"self", "dtype"}:
        return ("to", str(op.argument("dtype")))
    if op.target == "aten.tanh.default":
        return ("tanh",)
    number = op.argument("other")
    if op.target in SCALED and isinstance(number, int | float) and not isinstance(number, bool):
        return (SCALED[op.target], number)
    return None


def turned_dims(op: Op, rank: int) -> list[int]:
    """The dims of what a turning view reads, in the order of its result."""
    if op.target == "aten.permute.default":
        return [dim % rank for dim in op.argument("dims")]
    a, b = (0, 1) if op.target == "aten.t.default" else (op.argument("dim0") % rank, op.argument("dim1") % rank)
    order = list(range(rank))
    order[a], order[b] = order[b], order[a]
    return order


# -- the call


def print_linear_cross_entropy(p: Printing) -> str:
    shown = [p["self"], p["weight"], p["target"], f"chunks={p['chunks']}"]
    shown += [f"{key}={p[key]}" for key in ("bias", "slices", "steps", "logsumexp") if p.has(key)]
    samples, classes = p.literal("samples"), p.literal("classes")
    if samples:
        shown.append(f"samples={axes_text(samples)}")
    if classes:
        shown.append(f"classes={axes_text(classes)}")
        shown += [] if plain(p.literal("sharding"), p.many(classes)) else [f"sharding={p['sharding']}"]
        shown.append(f"size={p['size']}")
    shown += [f"class_weight={p['class_weight']}"] if p.has("class_weight") else []
    for key, usual in (("ignore_index", -100), ("label_smoothing", 0.0)):
        shown += [f"{key}={p[key]}"] if p.literal(key, usual) != usual else []
    reduction = p.literal("reduction", MEAN)
    shown += [f"reduction={REDUCTIONS[reduction]}"] if reduction != MEAN else []
    shown += [f"count={p['count']}"] if p.has("count") else []
    shown += ["reduced=True"] if p.literal("reduced") else []
    return f"{CHUNKED}({', '.join(shown)})"


def run_linear_cross_entropy(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.linear_cross_entropy(
        a["self"], a["weight"], a["target"], chunks=a["chunks"], bias=a["bias"], slices=a.get("slices", ()),
        steps=a.get("steps", ()), logsumexp=a["logsumexp"], samples=run.group(a["samples"]),
        classes=run.group(a["classes"]), sharding=a["sharding"], size=a["size"], class_weight=a["class_weight"],
        ignore_index=a.get("ignore_index", -100), reduction=reduction_of(a),
        label_smoothing=a.get("label_smoothing", 0.0), count=a["count"], reduced=a.get("reduced", False),
    )  # fmt: skip


define(CHUNKED, prints=print_linear_cross_entropy, positional=3, defaults=SMOOTHED, runs=run_linear_cross_entropy,
       reads="runtime.linear_cross_entropy(self, weight, target, chunks, bias, slices, steps, logsumexp, samples, "
             "classes, sharding, size, class_weight, ignore_index, reduction, label_smoothing, count, "
             "reduced)")  # fmt: skip

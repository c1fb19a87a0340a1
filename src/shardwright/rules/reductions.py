"""Sums, means, extremes, softmax and norms: ops that look along a dim."""

from __future__ import annotations

from .notation import Rule, parse
from .registry import Call, rule
from .views import named


def blocked(name: str) -> str:
    return name if name == "1" else f"{name}^"


def _reduced(call: Call, mark: str, linear: bool) -> Rule:
    """A reduction over some dims, each marked; kept dims have size 1."""
    gone = set(call.dims())
    names = named(call.shape)
    source = [name + mark if at in gone and name != "1" else name for at, name in enumerate(names)]
    keep = call.op.argument("keepdim", False)
    result = ["1" if at in gone else name for at, name in enumerate(names) if at not in gone or keep]
    flag = " ~1" if linear else ""
    return parse(f"{' '.join(source)}{flag} -> {', '.join([' '.join(result)] * len(call.outputs))}")


@rule("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim")
def total(call: Call) -> Rule:
    """Split over a summed dim it leaves a partial sum; a mean leaves a share (lower.local divides by the whole)."""
    if not call.outputs[0].floating and not call.inputs[0].floating and call.inputs[0].dtype == "bool":
        return _reduced(call, "+", False)
    return _reduced(call, "+", call.inputs[0].floating)


@rule(
    "aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.logsumexp.default",
    "aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.amax.default", "aten.amin.default",
    "aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default", "aten.any.dim", "aten.all.dim",
    "aten.any.default", "aten.all.default", "aten.prod.dim_int", "aten.max.default", "aten.min.default",
)  # fmt: skip
def blocked_reduction(call: Call) -> Rule:
    return _reduced(call, "^", False)


@rule(
    "softmax", "_softmax", "aten.softmax.int", "aten.log_softmax.int", "log_softmax", "_log_softmax", "cumsum",
    "aten.sort.default", "aten.topk.default", "aten.cumprod.default", "aten.argsort.default",
)  # fmt: skip
def along(call: Call) -> Rule:
    """One dim is looked along and stays whole; all others are free."""
    dim, names = call.dim("dim", -1), named(call.shape)
    linear = " ~1" if "cumsum" in call.op.target else ""
    names[dim] = blocked(names[dim])
    outs = []
    for value in call.outputs:
        same = value.shape[dim] == call.shape[dim]
        outs.append(" ".join(n if at != dim or same else str(value.shape[dim]) for at, n in enumerate(names)))
    return parse(f"{' '.join(names)}{linear} -> {', '.join(outs)}")


@rule("layer_norm", "rms_norm", "native_layer_norm", "_fused_rms_norm")
def trailing_norm(call: Call) -> Rule:
    width = len(call.op.argument("normalized_shape", ()))
    names = named(call.shape)
    names[len(names) - width :] = [blocked(name) for name in names[len(names) - width :]]
    rest = " ".join(names[len(names) - width :])
    outs = [" ".join(names)]
    for value in call.outputs[1:]:
        outs.append(" ".join(n if s != 1 else "1" for n, s in zip(names, value.shape, strict=True)))
    return parse(f"{', '.join([' '.join(names), *[rest] * (len(call.inputs) - 1)])} -> {', '.join(outs)}")


@rule("group_norm", "native_group_norm")
def group_norm(call: Call) -> Rule:
    names = named(call.shape)
    names[1:] = [blocked(name) for name in names[1:]]
    rest = [f", {names[1]}" for _ in call.inputs[1:]]
    outs = [" ".join(names)] + [" ".join([names[0], *map(str, v.shape[1:])]) for v in call.outputs[1:]]
    return parse(f"{' '.join(names)}{''.join(rest)} -> {', '.join(outs)}")


@rule("batch_norm", "_native_batch_norm_legit_functional", "_native_batch_norm_legit_no_training",
      "_native_batch_norm_legit", "aten._native_batch_norm_legit.no_stats", "native_batch_norm",
      "_batch_norm_with_update_functional")  # fmt: skip
def batch_norm(call: Call) -> Rule:
    """Channels are free. Rows, in training, by the algorithm that sums the statistics; in eval they are free too."""
    training = call.op.argument("training", "no_training" not in call.op.target)
    names = named(call.shape)
    names[0] = names[0] if names[0] == "1" else "n=batch" if training else "n"
    names[1] = "ch" if call.shape[1] != 1 else "1"
    names[2:] = [blocked(name) for name in names[2:]]
    inputs = [" ".join(names)]
    inputs += ["ch" if call.shape[1] != 1 else "1"] * (len(call.inputs) - 1)
    plain = [name.split("=")[0] for name in names]
    outs = [" ".join(plain)]
    for value in call.outputs[1:]:
        per_channel = len(value.shape) == 1 and value.shape[0] == call.shape[1] != 1
        outs.append("ch" if per_channel else " ".join(str(size) for size in value.shape))
    return parse(f"{', '.join(inputs)} -> {', '.join(outs)}")


@rule("max_pool2d", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d", "max_pool2d_with_indices",
      "adaptive_avg_pool1d", "adaptive_max_pool2d", "max_pool1d", "avg_pool1d", "aten.upsample_nearest2d.vec",
      "aten.upsample_bilinear2d.vec", "upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle",
      "aten.upsample_nearest1d.vec", "aten.upsample_nearest2d.default_")  # fmt: skip
def over_space(call: Call) -> Rule | None:
    """Batch and channels are free, space is not."""
    if len(call.shape) != (3 if "1d" in call.op.target else 4):  # without a batch dim
        return None
    channels = call.shape[1] == call.outputs[0].shape[1]
    lead = ["n" if call.shape[0] != 1 else "1", "c" if channels and call.shape[1] != 1 else str(call.shape[1])]
    inside = [*lead, *map(str, call.shape[2:])]
    outs = []
    for value in call.outputs:
        outs.append(" ".join([lead[0], lead[1] if channels else str(value.shape[1]), *map(str, value.shape[2:])]))
    return parse(f"{' '.join(inside)} -> {', '.join(outs)}")

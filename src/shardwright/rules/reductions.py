"""Sums, means, extremes, softmax and sorting: ops that look along a dim."""

from __future__ import annotations

from .dims import blocked, label_dims, marked, through, write_rule
from .notation import Rule
from .registry import OpCall, rule


def _reduced(call: OpCall, mark: str, linear: bool) -> Rule:
    """A reduction over some dims, each marked; kept dims have size 1."""
    gone = set(call.dims())
    names = label_dims(call.shape)
    source = [marked(name, mark) if at in gone else name for at, name in enumerate(names)]
    keep = call.op.argument("keepdim", False)
    result = ["1" if at in gone else name for at, name in enumerate(names) if at not in gone or keep]
    return write_rule([source], [result] * len(call.outputs), [1] if linear else [])


@rule("aten.sum.default", "aten.sum.dim_IntList", "aten.mean.default", "aten.mean.dim", "aten.nansum.default",
      "aten.count_nonzero.default", "aten.count_nonzero.dim_IntList")  # fmt: skip
def reduce_dims(call: OpCall) -> Rule:
    """Split over a summed dim it leaves a partial sum; a mean leaves a share (lower.local divides by the whole)."""
    return _reduced(call, "+", call.inputs[0].floating and call.op.target.split(".")[1] in ("sum", "mean"))


@rule("aten.amax.default", "aten.amin.default", "aten.max.default", "aten.min.default")
def extreme(call: OpCall) -> Rule:
    """The largest of the largest; a gradient would have to know which rank held it, so then the dim stays whole."""
    if call.outputs[0].gradient or call.outputs[0].dtype == "bool":
        return _reduced(call, "^", False)
    return _reduced(call, "+max" if "max" in call.op.target else "+min", False)


@rule(
    "aten.var.correction", "aten.std.correction", "aten.var_mean.correction", "aten.std_mean.correction",
    "aten.var.default", "aten.var.dim", "aten.std.default", "aten.std.dim", "aten.var_mean.dim", "aten.std_mean.dim",
    "aten.var_mean.default", "aten.std_mean.default",
    "aten.logsumexp.default", "aten.special_logsumexp.default", "aten.linalg_vector_norm.default",
    "aten.norm.ScalarOpt_dim", "aten.norm.Scalar", "aten.frobenius_norm.dim", "aten.linalg_norm.default",
    "aten.max.dim", "aten.min.dim", "aten.argmax.default", "aten.argmin.default", "aten.any.dim", "aten.all.dim",
    "aten.any.dims", "aten.all.dims", "aten.any.default", "aten.all.default", "aten.prod.dim_int",
    "aten.prod.default", "aten.nanmean.default", "aten.median.dim", "aten.median.default", "aten.nanmedian.dim",
    "aten.nanmedian.default", "aten.mode.default", "aten.kthvalue.default", "aten.aminmax.default",
    "aten.quantile.scalar", "aten.nanquantile.scalar",
)  # fmt: skip
def blocked_reduction(call: OpCall) -> Rule:
    """Dims that go stay whole. Those that look along the last dim by default say so."""
    last = call.op.target.split(".")[1] in ("mode", "kthvalue") and call.op.argument("dim") is None
    if last:
        return _reduced(OpCall(call.op.with_arguments(dim=-1), call.inputs, call.outputs), "^", False)
    return _reduced(call, "^", False)


@rule(
    "_softmax", "aten.softmax.int", "aten.log_softmax.int", "_log_softmax",
    "aten.sort.default", "aten.sort.stable", "aten.topk.default", "aten.argsort.default", "aten.argsort.stable",
    "aten.cumsum.default", "aten.cumprod.default", "aten.cummax.default", "aten.cummin.default",
    "aten.logcumsumexp.default",
)  # fmt: skip
def along(call: OpCall) -> Rule:
    """One dim is looked along and stays whole; all others are free."""
    return through(call, {call.dim("dim", -1)}, linear="cumsum." in call.op.target)


@rule("diff")
def diff(call: OpCall) -> Rule:
    """Neighbours along a dim; what is put before or behind has the other dims too."""
    dim = call.dim("dim", -1)
    names = label_dims(call.shape)

    def term(shape: tuple[int, ...]) -> list[str]:
        return [str(shape[at]) if at == dim else name for at, name in enumerate(names)]

    inputs = [term(value.shape) for value in call.inputs]
    return write_rule(inputs, [term(call.outputs[0].shape)], [1] * len(inputs))


@rule("aten.trapezoid.dx")
def trapezoid(call: OpCall) -> Rule:
    dim, names = call.dim("dim", -1), label_dims(call.shape)
    source = [blocked(name) if at == dim else name for at, name in enumerate(names)]
    return write_rule([source], [[name for at, name in enumerate(names) if at != dim]], [1])

"""Sums, means, extremes, softmax and sorting: ops that look along a dim."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Op
from ..layout import Mesh
from ..rules.dims import blocked, label_dims, marked, through, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import (
    AlgorithmCollective,
    LocalCall,
    Passes,
    ProgramOnRank,
    RankRun,
    RuntimeArguments,
    TracedCall,
)
from .localizing import divided, in_mesh_order, split_axes
from .norms import WIDE
from .pointwise import GRADIENT_ONLY, plain
from .printing import (
    Printer,
    Printing,
    axes_text,
    bracketed,
    function,
    functional,
)
from .spec import Kernel, define, input_work


def _reduced(call: OpCall, mark: str, linear: bool) -> Rule:
    """A reduction over some dims, each marked; kept dims have size 1."""
    gone = set(call.dims())
    names = label_dims(call.shape)
    source = [marked(name, mark) if at in gone else name for at, name in enumerate(names)]
    keep = call.op.argument("keepdim", False)
    result = ["1" if at in gone else name for at, name in enumerate(names) if at not in gone or keep]
    return write_rule([source], [result] * len(call.outputs), [1] if linear else [])


def reduce_dims(call: OpCall) -> Rule:
    """Split over a summed dim it leaves a partial sum; a mean leaves a share (`local_mean` divides by the whole)."""
    return _reduced(call, "+", call.inputs[0].floating and call.op.target.split(".")[1] in ("sum", "mean"))


def extreme(call: OpCall) -> Rule:
    """The largest of the largest; a gradient would have to know which rank held it, so then the dim stays whole."""
    if call.outputs[0].gradient or call.outputs[0].dtype == "bool":
        return _reduced(call, "^", False)
    return _reduced(call, "+max" if "max" in call.op.target else "+min", False)


def blocked_reduction(call: OpCall) -> Rule:
    """Dims that go stay whole. Those that look along the last dim by default say so."""
    last = call.op.target.split(".")[1] in ("mode", "kthvalue") and call.op.argument("dim") is None
    if last:
        return _reduced(OpCall(call.op.with_arguments(dim=-1), call.inputs, call.outputs), "^", False)
    return _reduced(call, "^", False)


def along(call: OpCall) -> Rule:
    """One dim is looked along and stays whole; all others are free."""
    return through(call, {call.dim("dim", -1)}, linear="cumsum." in call.op.target)


def diff(call: OpCall) -> Rule:
    """Neighbours along a dim; what is put before or behind has the other dims too."""
    dim = call.dim("dim", -1)
    names = label_dims(call.shape)

    def term(shape: tuple[int, ...]) -> list[str]:
        return [str(shape[at]) if at == dim else name for at, name in enumerate(names)]

    inputs = [term(value.shape) for value in call.inputs]
    return write_rule(inputs, [term(call.outputs[0].shape)], [1] * len(inputs))


def trapezoid(call: OpCall) -> Rule:
    dim, names = call.dim("dim", -1), label_dims(call.shape)
    source = [blocked(name) if at == dim else name for at, name in enumerate(names)]
    return write_rule([source], [[name for at, name in enumerate(names) if at != dim]], [1])


def canonical_sum(call: TracedCall) -> list[str]:
    """No dims are all of them, written out."""
    if call.arguments.get("dim") in (None, ()) and call.input_info.shape:
        return call.emit(**{**call.arguments, "dim": tuple(range(len(call.input_info.shape)))})
    return call.keep()


def local_mean(program: ProgramOnRank, op: Op) -> Op | tuple[Op, ...]:
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
    return divided(replace(op, target=target), count)


def print_reduction(name: str) -> Printer:
    def show(p: Printing) -> str:
        dims = p.literal("dim")
        every = dims is None or (dims == () and not p.literal("keepdim"))
        shown = [] if every else [p.show(dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims)]
        shown += [f"keepdim={p['keepdim']}"] if p.literal("keepdim") else []
        shown += [f"dtype={p['dtype']}"] if p.has("dtype") else []
        return f"{bracketed(p.first())}.{name}({', '.join(shown)})"

    return show


def saved_extreme(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> str:
    """Of two tensors both, of all elements the result, along a dim the indices."""
    if len(call.inputs) > 1:
        return "0 1"
    return "0 r" if len(call.outputs) < 2 else "r1"


def extreme_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """Of all elements: a mask of where the result is, in numbers, and what is shared among these places."""
    return 0.0, 2.25 * call.inputs[0].bytes if len(call.outputs) < 2 else 0.0


# -- logsumexp: over one dim, which may be split, as those of classes are


def logsumexp(call: OpCall) -> Rule:
    return _reduced(call, "=classes" if len(call.dims()) == 1 else "^", False)


def local_logsumexp(program: ProgramOnRank, op: Op) -> Op:
    layout = program.layouts[op.inputs[0]]
    dims = op.argument("dim")
    first = (dims or (0,))[0] if isinstance(dims, tuple) else dims  # a scalar has none; several are never sharded
    dim = first % max(len(layout.shards), 1)
    if not layout.shards or not layout.shards[dim]:
        return op
    axes = in_mesh_order(program, split_axes(layout, dim))
    return replace(op, target="runtime.logsumexp").with_arguments(dim=dim, classes=axes)


def print_logsumexp(p: Printing) -> str:
    keepdim = f", keepdim={p['keepdim']}" if p.literal("keepdim", False) else ""
    return f"runtime.logsumexp({p['self']}, {p['dim']}, {axes_text(p.literal('classes'))}{keepdim})"


def run_logsumexp(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.logsumexp(a["self"], a["dim"], run.group(a["classes"]), keepdim=a.get("keepdim", False))


def send_logsumexp(
    call: LocalCall, signature: Signature, axes: Mapping[str, tuple[str, ...]], mesh: Mesh
) -> list[AlgorithmCollective]:
    """all_reduce of the largest and of the sum of exponentials of each row."""
    row_bytes = call.outputs[0].elements * WIDE.get(call.inputs[0].dtype, 4)
    return [AlgorithmCollective("all_reduce", row_bytes, axes["classes"], "forward")] * 2


SUMMED = {"saved": "", "passes": GRADIENT_ONLY, "positional": 1, "defaults": {"dim": ()}}
define("sum", rule={"default dim_IntList": reduce_dims}, canonical={"dim_IntList": canonical_sum}, back="free",
       prints=print_reduction("sum"), reads="x.sum(dim, keepdim, dtype)", **SUMMED)  # fmt: skip
define("mean", rule={"default dim": reduce_dims}, localize=local_mean, prints=print_reduction("mean"),
       reads="x.mean(dim, keepdim, dtype)", **SUMMED)  # fmt: skip
define("nansum", rule=reduce_dims, saved="", passes=GRADIENT_ONLY)
define("count_nonzero", rule={"default dim_IntList": reduce_dims})
define("amax amin", rule=extreme, saved="0 r", prints=function, work=input_work(0.0, 1.5))
define("max min", rule={"default": extreme, "dim": blocked_reduction, "other": plain}, keeps_order=True,
       saved=saved_extreme, prints=function, work=extreme_work)  # fmt: skip
DEVIATION = {"rule": {"correction default dim": blocked_reduction}, "work": input_work(0.0, 1.2)}
define("var", saved="0", prints=function, **DEVIATION)
define("std", saved="0", **DEVIATION)
define("std_mean var_mean", saved="0 r", **DEVIATION)
define("logsumexp", rule=logsumexp, localize=local_logsumexp, collectives=send_logsumexp, saved="0 r",
       kernel=Kernel.FUNCTION, prints=function, work=input_work(1.0, 2.0))  # fmt: skip
define("runtime.logsumexp", prints=print_logsumexp, positional=3, defaults={"keepdim": False}, runs=run_logsumexp,
       reads="runtime.logsumexp(self, dim, classes, keepdim)")  # fmt: skip
define("linalg_vector_norm", rule=blocked_reduction, saved="0 r", work=input_work(0.0, 1.1))
define("norm", rule={"Scalar ScalarOpt_dim": blocked_reduction}, saved="0 r", work=input_work(0.0, 1.1))
define("prod", rule={"default dim_int": blocked_reduction}, saved="0 r", work=input_work(0.0, 1.5))
define("median", rule={"default dim": blocked_reduction}, saved="r1")
define("nanmedian", rule={"default dim": blocked_reduction})
define("kthvalue mode", rule=blocked_reduction, saved="r1")
define("argmax", rule=blocked_reduction, prints=function)
define("aminmax argmin linalg_norm nanmean special_logsumexp", rule=blocked_reduction)
define("frobenius_norm", rule={"dim": blocked_reduction})
define("nanquantile quantile", rule={"scalar": blocked_reduction})
define("all any", rule={"default dim dims": blocked_reduction})

SOFTMAX = {"kernel": Kernel.FUNCTION, "saved": "r"}
define("softmax", rule={"int": along}, prints=functional("softmax", "self", "dim", options=("dtype",)),
       reads="F.softmax(self, dim, dtype)", positional=2, **SOFTMAX)  # fmt: skip
define("_softmax", rule=along, prints=functional("softmax", "self", "dim"), reads="F.softmax(self, dim)",
       defaults={"half_to_float": False}, **SOFTMAX)  # fmt: skip
define("log_softmax", rule={"int": along}, prints=functional("log_softmax", "self", "dim", options=("dtype",)),
       reads="F.log_softmax(self, dim, dtype)", positional=2, **SOFTMAX)  # fmt: skip
define("_log_softmax", rule=along, **SOFTMAX)

SORTED = {"passes": Passes(inputs=8, outputs=2, results=1, gradients=1)}  # digits one after the other
define("sort", rule={"default stable": along}, saved="r1", prints=function, **SORTED)
define("topk", rule=along, saved="r1", prints=function, **SORTED)
define("argsort", rule={"default stable": along}, **SORTED)
define("cumsum", rule=along, saved="", passes=GRADIENT_ONLY, prints=function, work=(0.0, 2.0))  # of what is flipped
define("cumprod", rule=along, saved="0 r", work=(0.0, 3.25))
define("logcumsumexp", rule=along, saved="0 r", work=(0.0, 7.0))
define("cummax cummin", rule=along, saved="r1", work=(0.0, 1.0))
define("diff", rule=diff, saved="", prints=function, work=(0.0, 1.0))
define("trapezoid", rule={"dx": trapezoid})

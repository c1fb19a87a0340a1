"""Matrix products, with and without something added to them."""

from __future__ import annotations

import ast
from typing import Any

from ..ir import Op
from ..ir.graph import ITEM_SIZE
from ..rules.dims import label_dims, marked, stretched, write_rule
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall, letters
from .contexts import RankRun, RuntimeArguments, TracedCall
from .printing import Printing, axes_text, function, functional, plain, show_shard
from .reading import Arguments, as_tuple, read_form
from .spec import Kernel, define

# -- rules


def linear(call: OpCall) -> Rule:
    rows = " ".join(letters(len(call.shape) - 1, "m"))
    weight = call.inputs[1].shape
    out = "n" if len(weight) == 2 else ""
    extra = f", {out}&" if len(call.inputs) == 3 else ""
    return parse(f"{rows} k+ ~1, {out} k+ ~2{extra} -> {rows} {out}")


def added(call: OpCall) -> Rule:
    """A product and something added once to it, which broadcasts."""
    left, right, out = {
        "addmm": ("m k+", "k+ n", "m n"),
        "addmv": ("m k+", "k+", "m"),
        "addbmm": ("b+ m k+", "b+ k+ n", "m n"),
        "baddbmm": ("b m k+", "b k+ n", "b m n"),
        "addr": ("m", "n", "m n"),
    }[call.op.target.split(".")[1]]
    added = " ".join(stretched(call.shape, call.outputs[0].shape, out.split()))
    return parse(f"{added}&, {left}, {right} -> {out}")


def inner(call: OpCall) -> Rule | None:
    if not all(value.shape for value in call.inputs):
        return None
    left, right = letters(len(call.shape) - 1, "m"), letters(len(call.inputs[1].shape) - 1, "n")
    return write_rule([[*left, "k+"], [*right, "k+"]], [[*left, *right]], [1, 2])


def tensordot(call: OpCall) -> Rule:
    a, b = call.inputs[0].shape, call.inputs[1].shape
    contracted = [dim % len(a) for dim in call.op.argument("dims_self", ())]
    other = [dim % len(b) for dim in call.op.argument("dims_other", ())]
    left, right = label_dims(a, "m"), label_dims(b, "n")
    for at, (i, j) in enumerate(zip(contracted, other, strict=True)):
        name = marked(f"k{at}" if left[i] != "1" else "1", "+")
        left[i] = right[j] = name
    result = [
        *(n for at, n in enumerate(left) if at not in contracted),
        *(n for at, n in enumerate(right) if at not in other),
    ]
    return write_rule([left, right], [result], [1, 2])


def bilinear(call: OpCall) -> Rule:
    rows = label_dims(call.shape[:-1], "m")
    bias = [["n&"]] * (len(call.inputs) - 3)
    return write_rule([[*rows, "i+"], [*rows, "j+"], ["n", "i+", "j+"], *bias], [[*rows, "n"]])


def cdist(call: OpCall) -> Rule:
    out = call.outputs[0].shape
    rows = label_dims(out[:-2], "b")
    lead = [stretched(value.shape[:-2], out[:-2], rows) for value in call.inputs]
    return write_rule([[*lead[0], "m", "k^"], [*lead[1], "n", "k^"]], [[*rows, "m", "n"]])


def grouped(call: OpCall) -> Rule | None:
    """Runs of rows, each with its own matrix: the runs are where they are, both other sides are free.

    Torch's kernel wants rows of whole 16 bytes, so that sides are split in such units.
    """
    if len(call.shape) != 2 or len(call.inputs) != 3 or len(call.inputs[1].shape) != 3:
        return None
    runs, k, n = call.inputs[1].shape
    unit = 16 // ITEM_SIZE.get(call.inputs[0].dtype, 4)
    into, out = (f"({name} {unit})" if size % unit == 0 else str(size) for name, size in (("k+", k), ("n", n)))
    rule = write_rule(
        [[str(call.shape[0]), into], [str(runs), into, out], [str(runs)]], [[str(call.shape[0]), out]], [1, 2]
    )
    return rule.with_sizes({"k": k // unit, "n": n // unit})


def matmul(call: OpCall) -> Rule:
    """numpy's rules: leading dims broadcast, vectors have no row or column."""
    a, b = call.inputs[0].shape, call.inputs[1].shape
    out = call.outputs[0].shape
    batch = len(out) - (len(a) > 1) - (len(b) > 1)
    names = letters(batch, "b")

    def lead(shape: tuple[int, ...]) -> list[str]:
        leading = shape[:-2] if len(shape) > 1 else ()
        shown = names[batch - len(leading) :]
        return [n if s != 1 else "1" for n, s in zip(shown, leading, strict=True)]

    left = [*lead(a), *(["m"] if len(a) > 1 else []), "k+"]
    right = [*lead(b), "k+", *(["n"] if len(b) > 1 else [])]
    result = [n if s != 1 else "1" for n, s in zip(names, out[:batch], strict=True)]
    result += (["m"] if len(a) > 1 else []) + (["n"] if len(b) > 1 else [])
    return parse(f"{' '.join(left)} ~1, {' '.join(right)} ~2 -> {' '.join(result)}")


def einsum(call: OpCall) -> Rule:
    """As the equation says. A label that one tensor has twice is a diagonal: it stays whole."""
    equation = str(call.op.argument("equation", "")).replace(" ", "")
    if "->" not in equation:
        used = equation.replace(",", "").replace(".", "")
        once = "".join(sorted(name for name in set(used) if used.count(name) == 1))
        equation += f"->{'...' if '...' in equation else ''}{once}"
    left, right = equation.split("->")
    shapes = [value.shape for value in call.inputs]
    dots = [len(shape) - len(term.replace("...", "")) for term, shape in zip(left.split(","), shapes, strict=True)]
    lead = max(dots)
    inputs = [_labels(term, range(lead - own, lead)) for term, own in zip(left.split(","), dots, strict=True)]
    result = _labels(right, range(lead))
    stuck = {name for names in inputs for name in names if names.count(name) > 1}

    def shown(name: str, size: int) -> str:
        return "1" if size == 1 else f"{name}^" if name in stuck else name if name in result else f"{name}+"

    terms = [
        [shown(n, s) for n, s in zip(names, shape, strict=True)] for names, shape in zip(inputs, shapes, strict=True)
    ]
    out = [name if size != 1 else "1" for name, size in zip(result, call.outputs[0].shape, strict=True)]
    return write_rule(terms, [out], [at + 1 for at in range(len(terms))])


def _labels(term: str, lead: range) -> list[str]:
    """The labels of one tensor of an equation, dots written out."""
    before, dots, after = term.partition("...")
    return [*before, *(f"dot{at}" for at in lead if dots), *after]


# -- biases: separate in a graph, since they may have to wait for a sum; folded back at the end of lowering


def canonical_linear(call: TracedCall) -> list[str]:
    return _with_bias(call, call.target, {"input": call.first, "weight": call.arguments["weight"]}, "bias")


def canonical_addmm(call: TracedCall) -> list[str]:
    if not set(call.arguments) <= {"self", "mat1", "mat2"}:
        return call.keep()
    product = {"self": call.arguments["mat1"], "mat2": call.arguments["mat2"]}
    return _with_bias(call, "aten.mm.default", product, "self")


def _with_bias(call: TracedCall, target: str, product: dict[str, Any], name: str) -> list[str]:
    """A product and the addition of its bias as two ops."""
    bias = call.arguments.get(name)
    if not call.is_value(bias):
        return call.emit(target, **product)
    return call.emit("aten.add.Tensor", "bias", self=call.emit_one(target, product, call.info), other=bias)


# -- linears together with the reshard of their input


def print_linears(p: Printing) -> str:
    """One layer by its weight and bias, several by lists of them."""
    weights, biases, sharding = p.literal("weights"), p.literal("biases"), p.literal("sharding")
    single = len(weights) == 1
    shown = [p["input"], *([p["dim"]] if p.has("dim") else []), axes_text(p.literal("axes"))]
    for column in (weights, biases):
        if column is not None:
            shown.append(p.show(column[0]) if single else f"[{', '.join(p.show(item) for item in column)}]")
    if not plain(sharding, p.many(p.literal("axes"))):
        shown.append(f"sharding={show_shard(sharding)}")
    return f"{p.op.target.removesuffix('s') if single else p.op.target}({', '.join(shown)})"


def read_linears(op: Op, node: ast.expr) -> Arguments:
    lead = "input, dim, axes" if op.target == "runtime.all_gather_linears" else "input, axes"
    if len(op.argument("weights")) > 1:
        return read_form(op, node, f"{op.target}({lead}, weights, biases)")
    read = read_form(op, node, f"{op.target.removesuffix('s')}({lead}, weights, biases)")
    return {name: as_tuple([value]) if name in ("weights", "biases") else value for name, value in read.items()}


def run_replicate_linears(run: RankRun, a: RuntimeArguments) -> object:
    return run.runtime.replicate_linears(a["input"], run.group(a["axes"]), a["weights"], a["biases"])


def run_all_gather_linears(run: RankRun, a: RuntimeArguments) -> object:
    group = run.group(a["axes"])
    return run.runtime.all_gather_linears(a["input"], a["dim"], group, a["weights"], a["biases"], a["sharding"])


# -- definitions

MATMUL = {"kernel": Kernel.MATMUL, "saved": "0* 1*"}
PLAIN = {"dense": True, "fresh": True, **MATMUL}
define("linear", rule=linear, canonical=canonical_linear, flattens=True, folds_bias=True, delays_weights=True,
       prints=functional("linear", "input", "weight", "bias"), reads="F.linear(input, weight, bias)",
       **PLAIN)  # fmt: skip
define("mm", rule="m k+ ~1, k+ n ~2 -> m n", folds_bias=True, operator={"default": "@"}, **PLAIN)
define("bmm", rule="b m k+ ~1, b k+ n ~2 -> b m n", operator={"default": "@"}, **PLAIN)
define("matmul", rule=matmul, flattens=True, operator={"default": "@"}, **PLAIN)
define("addmm", rule=added, canonical=canonical_addmm, delays_weights=True, operands=(1, 2),
       prints=lambda p: f"torch.addmm({p['self']}, {p['mat1']}, {p['mat2']}{p.options('beta', 'alpha')})",
       reads="torch.addmm(self, mat1, mat2, beta, alpha)", positional=3, **{**PLAIN, "saved": "1* 2*"})  # fmt: skip
define("baddbmm", rule=added, kernel=Kernel.MATMUL, saved="1* 2*", operands=(1, 2), prints=function)
define("addmv", rule=added, operands=(1, 2), **MATMUL)
define("addbmm", rule=added, operands=(1, 2), kernel=Kernel.MATMUL)
define("addr", rule=added)
define("mv", rule="m k+ ~1, k+ ~2 -> m", **MATMUL)
define("dot", rule="k+ ~1, k+ ~2 -> ", saved="0* 1*")
define("outer", rule="m ~1, n ~2 -> m n", saved="0* 1*", work=(0.0, 2.0))
define("ger", rule="m ~1, n ~2 -> m n")
define("linalg_vecdot", rule="* k+ ~1, * k+ ~2 -> *")
define("inner", rule=inner)
define("tensordot", rule=tensordot)
define("einsum", rule=einsum, operands=None, reads="torch.einsum(equation, *tensors)",
       prints=lambda p: f"torch.einsum({p['equation']}, {p.listed('tensors')})", **MATMUL)  # fmt: skip
define("bilinear", rule=bilinear, kernel=Kernel.MATMUL)
define("cdist _cdist_forward", rule=cdist, work=(0.0, 3.0))
define("_grouped_mm", rule=grouped, kernel=Kernel.MATMUL)
define("transformers.grouped_mm_fallback.default", rule=grouped)
define("_addmm_activation _int_mm _scaled_mm _scaled_mm_v2 _scaled_grouped_mm _scaled_grouped_mm_v2 "
       "_weight_int4pack_mm _weight_int8pack_mm _mixed_dtypes_linear _dyn_quant_matmul_4bit _trilinear chain_matmul "
       "linalg_matmul _sparse_addmm _sparse_mm sparse_sampled_addmm sspaddmm hspmm smm",
       kernel=Kernel.MATMUL)  # fmt: skip
define("runtime.replicate_linears", prints=print_linears, reads=read_linears, runs=run_replicate_linears)
define("runtime.all_gather_linears", prints=print_linears, reads=read_linears, runs=run_all_gather_linears)

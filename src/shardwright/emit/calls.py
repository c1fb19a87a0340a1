"""How each op prints: as the function or operator that people know, else as `torch.ops`."""

from __future__ import annotations

import keyword
from collections.abc import Callable, Mapping
from dataclasses import replace

from ..ir import Op
from ..layout import Cut
from .printing import Printing, axes_text, plain, show_cut
from .sizes import SizeNames

Printer = Callable[[Printing], str]

OPERATORS = {
    "add.Tensor": "+", "add.Scalar": "+", "sub.Tensor": "-", "sub.Scalar": "-", "mul.Tensor": "*", "mul.Scalar": "*",
    "div.Tensor": "/", "div.Scalar": "/", "pow.Tensor_Scalar": "**", "pow.Tensor_Tensor": "**", "matmul.default": "@",
    "mm.default": "@", "eq.Scalar": "==", "eq.Tensor": "==", "ne.Scalar": "!=", "ne.Tensor": "!=", "lt.Scalar": "<",
    "lt.Tensor": "<", "le.Scalar": "<=", "le.Tensor": "<=", "gt.Scalar": ">", "gt.Tensor": ">", "ge.Scalar": ">=",
    "ge.Tensor": ">=", "bitwise_and.Tensor": "&", "bitwise_or.Tensor": "|", "logical_and.default": "&",
    "__and__.Tensor": "&", "__or__.Tensor": "|", "bmm.default": "@",
}  # fmt: skip
FUNCTIONS = (
    "arange ones zeros full full_like ones_like zeros_like cumsum gather index_select masked_fill topk sort clamp "
    "clamp_min clamp_max rms_norm repeat_interleave flip roll tril triu diff where argmax amax amin logsumexp var "
    "maximum minimum logical_not bitwise_not baddbmm group_norm"
).split()
"""Ops that torch has under the same name with the same arguments."""

METHODS = (
    "relu tanh sigmoid exp log sqrt rsqrt neg abs cos sin erf contiguous detach t reciprocal square "
    "floor ceil round sign clone"
).split()


def call_text(op: Op, names: Mapping[int, str], sizes: SizeNames, parts: Mapping[str, int]) -> str:
    """The right-hand side of an op's line."""
    printing = Printing(op, names, sizes, parts)
    if op.target.startswith("comm."):
        return _converter(printing)
    if op.target.startswith("call.") and op.target not in PRINTERS:
        shown = ", ".join(printing.show(value) for _, value in op.arguments)
        return f"{function_name(op.target.removeprefix('call.'))}({shown})"
    if op.target.startswith("weights."):
        plain = call_text(replace(op, target=op.target.removeprefix("weights.")), names, sizes, parts)
        return f"self.weights.{plain.removeprefix('F.').removeprefix('torch.')}"
    name = op.target.removeprefix("aten.")
    if name in OPERATORS:
        return _operator(printing, OPERATORS[name])
    base = name.rsplit(".", 1)[0]
    if op.target in PRINTERS or base in PRINTERS:
        return PRINTERS.get(op.target, PRINTERS.get(base, _fallback))(printing)
    if base in METHODS and len(op.arguments) == 1:
        return f"{bracketed(printing.first())}.{base}()"
    if base in FUNCTIONS and op.arguments:
        return _function(printing, base)
    return _fallback(printing)


def function_name(path: str) -> str:
    """The name of a user's function in the file. No leading underscores: a class would mangle `__main___f`."""
    return "_".join(part.strip("_") for part in path.replace("<", "").replace(">", "").split("."))


def _function(p: Printing, name: str) -> str:
    shown = [p.first(), *(f"{key}={p.show(value)}" for key, value in p.op.arguments[1:])]
    return f"torch.{name}({', '.join(shown)})"


def bracketed(text: str) -> str:
    return f"({text})" if " " in text and not text.endswith(")") else text


def _operator(p: Printing, sign: str) -> str:
    left = p.first()
    right = p["other"] if p.has("other") else p["exponent"] if p.has("exponent") else p["mat2"]
    alpha = p.literal("alpha", 1)
    if alpha != 1:
        right = f"{alpha} * {right}"
    return f"{left} {sign} {right}"


def _fallback(p: Printing) -> str:
    arguments = list(p.op.arguments)
    shown = [p.show(arguments[0][1])] if arguments else []
    shown += [_named(name, p.show(value)) for name, value in arguments[1:]]
    return f"torch.ops.{p.op.target}({', '.join(shown)})"


def _named(name: str, text: str) -> str:
    """An argument by name; torch has some called `from`."""
    return f'**{{"{name}": {text}}}' if keyword.iskeyword(name) else f"{name}={text}"


def _converter(p: Printing) -> str:
    kind = p.op.target.removeprefix("comm.")
    axes: tuple[str, ...] = p.literal("axes")
    group, x = axes_text(axes), p.names[0]
    if kind == "exchange":
        cuts = [("gather_cut", p.literal("cut")), ("take_cut", p.literal("to_cut"))]
        extra = "".join(f", {key}={show_cut(cut)}" for key, cut in cuts if not plain(cut, p.many(axes)))
        return f"comm.exchange({x}, {p['dim']}, {p['to_dim']}, {group}{extra})"
    if kind == "reduce":
        return f"comm.reduce({x}, {group}, {p['op']})"
    if p.literal("later"):
        return f"runtime.fan_in_later({x}, {group})"
    if p.literal("dim") is None:
        return f"comm.{kind}{'_' if p.literal('in_place') else ''}({x}, {group})"
    cut = p.literal("cut")
    extra = "" if plain(cut, p.many(axes)) else f", {show_cut(cut)}"
    return f"comm.{kind}({x}, {p['dim']}, {group}{extra})"


def _view(p: Printing) -> str:
    key = "size" if p.has("size") else "shape"
    method = {"_unsafe_view": "view"}.get(p.op.target.split(".")[1], p.op.target.split(".")[1])
    return f"{p.first()}.{method}({p.listed(key) or '()'})"


def _dims_method(name: str, *keys: str) -> Printer:
    def show(p: Printing) -> str:
        shown = [p.listed(key) for key in keys if p.has(key)]
        return f"{p.first()}.{name}({', '.join(shown)})"

    return show


def _reduction(name: str) -> Printer:
    def show(p: Printing) -> str:
        dims = p.literal("dim")
        shown = (
            [] if dims in (None, ()) else [p.show(dims if not isinstance(dims, tuple) or len(dims) > 1 else dims[0])]
        )
        shown += [f"keepdim={p['keepdim']}"] if p.literal("keepdim") else []
        shown += [f"dtype={p['dtype']}"] if p.has("dtype") else []
        return f"{bracketed(p.first())}.{name}({', '.join(shown)})"

    return show


def _functional(name: str, *keys: str, options: tuple[str, ...] = ()) -> Printer:
    def show(p: Printing) -> str:
        shown = [p[key] for key in keys if p.has(key)]
        return f"F.{name}({', '.join(shown)}{p.options(*options)})"

    return show


REDUCTIONS = {0: '"none"', 1: '"mean"', 2: '"sum"'}


def _loss(name: str, *options: str) -> Printer:
    def show(p: Printing) -> str:
        reduction = p.literal("reduction", 1)
        extra = f", reduction={REDUCTIONS[reduction]}" if reduction != 1 else ""
        return f"F.{name}({p['self']}, {p['target']}{p.options(*options)}{extra})"

    return show


def _cross_entropy(p: Printing) -> str:
    reduction = p.literal("reduction", 1)
    rows, classes = p.literal("rows"), p.literal("classes")
    shown = [p["self"], p["target"]]
    if rows:
        shown.append(f"rows={axes_text(rows)}")
    if classes:
        shown += [f"classes={axes_text(classes)}", f"cut={p['cut']}", f"size={p['size']}"]
    shown += _which_labels(p)
    if reduction != 1:
        shown.append(f"reduction={REDUCTIONS[reduction]}")
    if p.literal("label_smoothing", 0.0):
        shown.append(f"label_smoothing={p['label_smoothing']}")
    if p.has("count"):
        shown.append(f"count={p['count']}")
    if p.literal("whole"):
        shown.append("whole=True")
    where = "runtime" if p.op.target.startswith("runtime.") else "F"
    return f"{where}.{'nll_loss' if 'nll' in p.op.target else 'cross_entropy'}({', '.join(shown)})"


def _which_labels(p: Printing) -> list[str]:
    kept = [("weight", None), ("ignore_index", -100)]
    return [f"{key}={p[key]}" for key, usual in kept if p.literal(key, usual) != usual]


def _begin_count(p: Printing) -> str:
    rows = axes_text(p.literal("rows"))
    return f"runtime.begin_count({', '.join([p['target'], f'rows={rows}', *_which_labels(p)])})"


def _attention(p: Printing) -> str:
    causal = ", is_causal=True" if p.literal("is_causal") else ""
    gqa = ", enable_gqa=True" if p.literal("enable_gqa") else ""
    drop = f", dropout_p={p['dropout_p']}" if p.literal("dropout_p") else ""
    return (
        f"F.scaled_dot_product_attention({p['query']}, {p['key']}, {p['value']}"
        f"{p.options('attn_mask', 'scale')}{drop}{causal}{gqa})"
    )


def _slice(p: Printing) -> str:
    dim = p.literal("dim", 0)
    step = p.literal("step", 1)
    start, end = p.literal("start"), p.literal("end")
    low = "" if start in (None, 0) else p.show(start)
    high = "" if end is None or (isinstance(end, int) and end > 1 << 60) else p.show(end)
    span = f"{low}:{high}" + (f":{step}" if step != 1 else "")
    if dim < 0:
        return f"{p.first()}[..., {span}{', :' * (-dim - 1)}]"
    return f"{p.first()}[{':, ' * dim}{span}]"


def _select(p: Printing) -> str:
    dim, index = p.literal("dim", 0), p["index"]
    if isinstance(dim, int) and dim >= 0:
        return f"{p.first()}[{':, ' * dim}{index}]"
    return f"{p.first()}.select({dim}, {index})"


def _split(p: Printing) -> str:
    key = "split_size" if p.has("split_size") else "split_sizes"
    size = p[key] if key == "split_size" else f"({p.listed(key)})"
    return f"{p.first()}.split({size}, {p.literal('dim', 0)})"


def _conv(p: Printing) -> str:
    stride = p.literal("stride", ())
    dims = len(stride) if isinstance(stride, tuple) and stride else 2
    transposed = "transpose" in p.op.target or p.literal("transposed", False)
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    if p.op.target.startswith("aten.conv") and p.op.target.split(".")[1] != "convolution":
        name = p.op.target.split(".")[1]
    bias = f", {p['bias']}" if p.has("bias") else ""
    extra = p.options("stride", "padding", "dilation", "groups")
    if transposed and p.has("output_padding"):
        extra += p.options("output_padding")
    return f"F.{name}({p['input']}, {p['weight']}{bias}{extra})"


def _embedding(p: Printing) -> str:
    padding = p.literal("padding_idx", -1)
    extra = f", padding_idx={padding}" if padding is not None and padding >= 0 else ""
    if p.op.target.startswith("runtime."):
        return (
            f"runtime.embedding_rows({p['indices']}, {p['weight']}, {axes_text(p.literal('axes'))}, {p['cut']}, "
            f"rows={p['rows']}{extra})"
        )
    return f"F.embedding({p['indices']}, {p['weight']}{extra})"


def _linears(p: Printing) -> str:
    """One layer by its weight and bias, several by lists of them."""
    weights, biases, cut = p.literal("weights"), p.literal("biases"), p.literal("cut")
    one = len(weights) == 1
    shown = [p["input"], *([p["dim"]] if p.has("dim") else []), axes_text(p.literal("axes"))]
    for column in (weights, biases):
        if column is not None:
            shown.append(p.show(column[0]) if one else f"[{', '.join(p.show(held) for held in column)}]")
    if not plain(cut, p.many(p.literal("axes"))):
        shown.append(f"cut={show_cut(cut)}")
    return f"{p.op.target.removesuffix('s') if one else p.op.target}({', '.join(shown)})"


def _batch_norm(p: Printing) -> str:
    axes = p.literal("axes")
    group = axes_text(axes) if axes else "None"
    return (
        f"runtime.batch_norm({p['input']}, {p['weight']}, {p['bias']}, {p['running_mean']}, {p['running_var']}, "
        f"True, {p['momentum']}, {p['eps']}, {group}){'' if len(p.op.outputs) > 1 else '[0]'}"
    )


def _own(p: Printing) -> str:
    shown = [f"{name}={p.show(held)}" if name else p.show(held) for name, held in p.literal("given")]
    found = f"{p['path']}, {p['label']}, {axes_text(p.literal('axes'))}, {p['size']}"
    return f"runtime.own({found})({', '.join(shown)})"


def _splits(p: Printing) -> str:
    splits: tuple[tuple[int, Cut], ...] = p.literal("splits")
    shown = ", ".join(f"({dim}, {axes_text((cut.axis,))}, {show_cut(cut)})" for dim, cut in splits)
    return f", splits=[{shown}]" if splits else ""


def _dropout(p: Printing) -> str:
    return f"self.random.dropout({p.first()}, {p['p']}, {p['op_key']}{_splits(p)})"


def _keyed_attention(p: Printing) -> str:
    mask = p["attn_mask"] if p.has("attn_mask") else "None"
    return (
        f"self.random.attention({p['query']}, {p['key']}, {p['value']}, {mask}, {p['dropout_p']}, "
        f"{bool(p.literal('is_causal'))}, {p['scale']}, {bool(p.literal('enable_gqa'))}, op={p['op_key']}{_splits(p)})"
    )


def _opaque(p: Printing) -> str:
    """A part of the user's model that stays as it is; it takes its parameters from the stage, except those named."""
    shown = [p["op_key"], *(p.show(held) for held in p.literal("tensors"))]
    given = [f'"{name}": {p.show(held)}' for name, held in zip(p.literal("names"), p.literal("held"), strict=True)]
    shown += [f"held={{{', '.join(given)}}}"] if given else []
    shown += [f"over={axes_text(p.literal('axes'))}"] if p.literal("axes") else []
    if p.literal("home"):
        shown += [f"home={axes_text(p.literal('home'))}", f"cut={p['cut']}"]
        return f"self.experts({', '.join(shown)})"
    return f"self.opaque({', '.join(shown)})"


def _cond(p: Printing) -> str:
    given = p.literal("operands")
    shown = [p["predicate"]]
    for role in ("then", "other"):
        taken = tuple(given[at] for at in p.literal(f"{role}_takes"))
        shown += [f"self.{p.literal(role)}", p.show(taken)]
    return f"runtime.cond({', '.join(shown)})"


def _scan(p: Printing) -> str:
    return f"runtime.scan(self.{p.literal('step')}, {p['init']}, {p['xs']}, {p['held']})"


def _while_loop(p: Printing) -> str:
    bodies = f"self.{p.literal('test')}, self.{p.literal('body')}"
    return f"runtime.while_loop({bodies}, {p['carried']}, {p['held']})"


def _index(p: Printing) -> str:
    shown = [":" if held is None else p.show(held) for held in p.literal("indices")]
    return f"{p.first()}[{', '.join(shown)}]"


def _pad(p: Printing) -> str:
    value = p.literal("value")
    return f"F.pad({p.first()}, {p['pad']}{f', value={p.show(value)}' if value else ''})"


def _cast(p: Printing) -> str:
    return f"{bracketed(p.first())}.to({p['dtype']})"


def _where(p: Printing) -> str:
    return f"torch.where({p['condition']}, {p['self']}, {p['other']})"


def _layer_norm(p: Printing) -> str:
    shown = [p["input"], p["normalized_shape"]]
    shown += [p["weight"]] if p.has("weight") or p.has("bias") else []
    shown += [p["bias"]] if p.has("bias") else []
    return f"F.layer_norm({', '.join(shown)}{p.options('eps')})"


def _listed_call(name: str) -> Printer:
    def show(p: Printing) -> str:
        return f"torch.{name}([{p.listed('tensors')}], {p.literal('dim', 0)})"

    return show


PRINTERS: dict[str, Printer] = {
    "view": _view, "reshape": _view, "_unsafe_view": _view, "expand": _view,
    "transpose": _dims_method("transpose", "dim0", "dim1"), "permute": _dims_method("permute", "dims"),
    "unsqueeze": _dims_method("unsqueeze", "dim"), "squeeze": _dims_method("squeeze", "dim"),
    "unbind": _dims_method("unbind", "dim"), "chunk": _dims_method("chunk", "chunks", "dim"),
    "sum": _reduction("sum"), "mean": _reduction("mean"), "linear": _functional("linear", "input", "weight", "bias"),
    "addmm": lambda p: f"torch.addmm({p['self']}, {p['mat1']}, {p['mat2']}{p.options('beta', 'alpha')})",
    "gelu": _functional("gelu", "self", options=("approximate",)), "silu": _functional("silu", "self"),
    "softmax": _functional("softmax", "self", "dim", options=("dtype",)),
    "_softmax": _functional("softmax", "self", "dim"),
    "log_softmax": _functional("log_softmax", "self", "dim", options=("dtype",)),
    "layer_norm": _layer_norm, "embedding": _embedding, "runtime.embedding_rows": _embedding,
    "cross_entropy_loss": _cross_entropy, "runtime.cross_entropy": _cross_entropy,
    "runtime.nll_loss": _cross_entropy, "runtime.begin_count": _begin_count,
    "runtime.count_labels": lambda p: f"runtime.count_labels({', '.join([p['target'], *_which_labels(p)])})",
    "runtime.fan_out_linears": _linears, "runtime.gather_linears": _linears,
    "mse_loss": _loss("mse_loss"), "l1_loss": _loss("l1_loss"), "scaled_dot_product_attention": _attention,
    "slice": _slice, "select": _select, "split": _split, "split_with_sizes": _split, "convolution": _conv,
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "conv_transpose2d": _conv,
    "runtime.batch_norm": _batch_norm, "runtime.dropout": _dropout, "runtime.attention": _keyed_attention,
    "runtime.own": _own, "_to_copy": _cast, "where": _where,
    "call.opaque": _opaque, "runtime.experts": _opaque,
    "call.cond": _cond, "call.scan": _scan, "call.while_loop": _while_loop,
    "index": _index, "constant_pad_nd": _pad, "pad": _pad, "relu": _functional("relu", "self"),
    "cat": _listed_call("cat"), "stack": _listed_call("stack"),
    "einsum": lambda p: f"torch.einsum({p['equation']}, {p.listed('tensors')})",
    "broadcast_tensors": lambda p: f"torch.broadcast_tensors({p.listed('tensors')})",
}  # fmt: skip

"""How each op prints: as the function or operator that people know, else as `torch.ops`."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from dataclasses import replace

from ..errors import LoweringError
from ..ir import Op
from .printing import Printing
from .runtime_calls import REDUCTIONS, RUNTIME_PRINTERS, Printer, cross_entropy, reshard_call
from .sizes import SizeNames

OPERATORS = {
    "add.Tensor": "+", "add.Scalar": "+", "sub.Tensor": "-", "sub.Scalar": "-", "mul.Tensor": "*", "mul.Scalar": "*",
    "div.Tensor": "/", "div.Scalar": "/", "pow.Tensor_Scalar": "**", "pow.Tensor_Tensor": "**", "matmul.default": "@",
    "mm.default": "@", "eq.Scalar": "==", "eq.Tensor": "==", "ne.Scalar": "!=", "ne.Tensor": "!=", "lt.Scalar": "<",
    "lt.Tensor": "<", "le.Scalar": "<=", "le.Tensor": "<=", "gt.Scalar": ">", "gt.Tensor": ">", "ge.Scalar": ">=",
    "ge.Tensor": ">=", "bitwise_and.Tensor": "&", "bitwise_or.Tensor": "|", "__and__.Tensor": "&",
    "__or__.Tensor": "|", "bmm.default": "@",
}  # fmt: skip
FUNCTIONS = (
    "arange ones zeros full full_like ones_like zeros_like cumsum gather index_select masked_fill topk sort clamp "
    "clamp_min clamp_max rms_norm repeat_interleave flip roll tril triu diff where argmax amax amin logsumexp var "
    "maximum minimum logical_not logical_and logical_or bitwise_not baddbmm group_norm"
).split()
"""Ops that torch has under the same name with the same arguments."""

METHODS = (
    "relu tanh sigmoid exp log sqrt rsqrt neg abs cos sin erf contiguous detach t reciprocal square "
    "floor ceil round sign clone"
).split()


LISTS = frozenset(
    "split split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit unsafe_split unsafe_split_with_sizes "
    "unsafe_chunk meshgrid broadcast_tensors gradient nonzero_numpy split_copy split_with_sizes_copy "
    "unbind_copy".split()
)
"""Ops that return a list, be it of one tensor."""


def returns_list(op: Op) -> bool:
    base, _, overload = op.target.removeprefix("aten.").partition(".")
    return base in LISTS or overload == "Sequence"


def call_text(op: Op, names: Mapping[int, str], sizes: SizeNames, parts: Mapping[str, int]) -> str:
    """The right-hand side of an op's line."""
    printing = Printing(op, names, sizes, parts)
    if op.target.startswith("comm."):
        return reshard_call(printing)
    if op.target.startswith("call.") and op.target not in PRINTERS:
        shown = ", ".join(printing.show(value) for _, value in op.arguments)
        return f"{function_name(op.target.removeprefix('call.'))}({shown})"
    if op.target.startswith("weights."):
        plain = call_text(replace(op, target=op.target.removeprefix("weights.")), names, sizes, parts)
        return f"self.weights.{plain.removeprefix('F.').removeprefix('torch.')}"
    text = _printer(op)(printing)
    if not printing.unread:
        return text
    if not op.target.startswith("aten."):
        raise LoweringError(f"{op}: generated code has no place for its argument {', '.join(printing.unread)}")
    return _fallback(printing)


def _printer(op: Op) -> Printer:
    name = op.target.removeprefix("aten.")
    base = name.rsplit(".", 1)[0]
    if name in OPERATORS:
        return lambda p: _operator(p, OPERATORS[name])
    if op.target in PRINTERS or base in PRINTERS:
        return PRINTERS.get(op.target) or PRINTERS[base]
    if base in METHODS and len(op.arguments) == 1:
        return lambda p: f"{bracketed(p.first())}.{base}()"
    return (lambda p: _function(p, base)) if base in FUNCTIONS and op.arguments else _fallback


def function_name(path: str) -> str:
    """The name of a user's function in the file. No leading underscores: a class would mangle `__main___f`."""
    return "_".join(part.strip("_") for part in path.replace("<", "").replace(">", "").split("."))


def _function(p: Printing, name: str) -> str:
    shown = [p.first(), *(f"{key}={p[key]}" for key, _ in p.op.arguments[1:])]
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
    shown = [p.first()] if p.op.arguments else []
    shown += [_named(name, p[name]) for name, _ in p.op.arguments[1:]]
    return f"torch.ops.{p.op.target}({', '.join(shown)})"


def _named(name: str, text: str) -> str:
    """An argument by name; torch has some called `from`."""
    return f'**{{"{name}": {text}}}' if keyword.iskeyword(name) else f"{name}={text}"


def _view(p: Printing) -> str:
    key = "size" if p.has("size") else "shape"
    method = {"_unsafe_view": "view"}.get(p.op.target.split(".")[1], p.op.target.split(".")[1])
    return f"{p.first()}.{method}({p.listed(key) or '()'})"


def _dims_method(name: str, *keys: str) -> Printer:
    def show(p: Printing) -> str:
        shown = [p.listed(key) or "()" for key in keys if p.has(key)]
        return f"{p.first()}.{name}({', '.join(shown)})"

    return show


def _reduction(name: str) -> Printer:
    def show(p: Printing) -> str:
        dims = p.literal("dim")
        every = dims is None or (dims == () and not p.literal("keepdim"))
        shown = [] if every else [p.show(dims[0] if isinstance(dims, tuple) and len(dims) == 1 else dims)]
        shown += [f"keepdim={p['keepdim']}"] if p.literal("keepdim") else []
        shown += [f"dtype={p['dtype']}"] if p.has("dtype") else []
        return f"{bracketed(p.first())}.{name}({', '.join(shown)})"

    return show


def _functional(name: str, *keys: str, options: tuple[str, ...] = ()) -> Printer:
    def show(p: Printing) -> str:
        shown = [p[key] for key in keys if p.has(key)]
        return f"F.{name}({', '.join(shown)}{p.options(*options)})"

    return show


def _loss(name: str, *options: str) -> Printer:
    def show(p: Printing) -> str:
        reduction = p.literal("reduction", 1)
        extra = f", reduction={REDUCTIONS[reduction]}" if reduction != 1 else ""
        return f"F.{name}({p['self']}, {p['target']}{p.options(*options)}{extra})"

    return show


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
    name = p.op.target.split(".")[1]
    if name == "convolution":
        name = f"conv{'_transpose' if p.literal('transposed', False) else ''}{len(p.literal('stride'))}d"
    bias = f", {p['bias']}" if p.has("bias") else ""
    extra = p.options("stride", "padding", "dilation", "groups")
    if "transpose" in name and p.has("output_padding"):
        extra += p.options("output_padding")
    return f"F.{name}({p['input']}, {p['weight']}{bias}{extra})"


def _embedding(p: Printing) -> str:
    padding = p.literal("padding_idx", -1)
    extra = f", padding_idx={padding}" if padding is not None and padding >= 0 else ""
    return f"F.embedding({p['indices']}, {p['weight']}{extra})"


def _index(p: Printing) -> str:
    shown = [":" if item is None else p.show(item) for item in p.literal("indices")]
    return f"{p.first()}[{', '.join(shown)}]"


def _pad(p: Printing) -> str:
    value = p.literal("value")
    usual = value is None or (not value and "constant" in p.op.target)  # 0.0 is not what `pad` has by default
    return f"F.pad({p.first()}, {p['pad']}{'' if usual else f', value={p.show(value)}'})"


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
    "layer_norm": _layer_norm, "embedding": _embedding,
    "cross_entropy_loss": cross_entropy,
    "mse_loss": _loss("mse_loss"), "l1_loss": _loss("l1_loss"), "scaled_dot_product_attention": _attention,
    "slice": _slice, "select": _select, "split": _split, "split_with_sizes": _split, "convolution": _conv,
    "conv1d": _conv, "conv2d": _conv, "conv3d": _conv, "conv_transpose2d": _conv,
    "_to_copy": _cast, "where": _where,
    "index": _index, "constant_pad_nd": _pad, "pad": _pad, "relu": _functional("relu", "self"),
    "cat": _listed_call("cat"), "stack": _listed_call("stack"),
    "einsum": lambda p: f"torch.einsum({p['equation']}, {p.listed('tensors')})",
    "broadcast_tensors": lambda p: f"torch.broadcast_tensors({p.listed('tensors')})",
    **RUNTIME_PRINTERS,
}  # fmt: skip

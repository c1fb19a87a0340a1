"""Convolutions: batch and channels may be split, space would need halos and stays whole."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from ..ir import Op
from ..rules.notation import Rule, parse
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import LocalCall, TracedCall
from .printing import Printing
from .reading import Arguments, read_form
from .spec import Kernel, define


def convolution(call: OpCall) -> Rule | None:
    """Batch and channels; space would need halos and stays whole."""
    x, w, y = call.inputs[0].shape, call.inputs[1].shape, call.outputs[0].shape
    n = "n" if len(x) == len(w) else ""
    x, y = (x, y) if n else ((1, *x), (1, *y))
    groups = call.op.argument("groups", 1)
    transposed = "transpose" in call.op.target or bool(call.op.argument("transposed", False))
    inside = " ".join(str(size) for size in x[2:])
    outside = " ".join(str(size) for size in y[2:])
    window = " ".join(str(size) for size in w[2:])
    bias = "" if len(call.inputs) < 3 else ", o&" if groups == 1 else ", (g o)&"
    if groups == 1:
        weight = "c+ o" if transposed else "o c+"
        return parse(f"{n} c+ {inside} ~1, {weight} {window} ~2{bias} -> {n} o {outside}")
    weight = "(g c+) o" if transposed else "(g o) c+"
    rule = parse(f"{n} (g c+) {inside} ~1, {weight} {window} ~2{bias} -> {n} (g o) {outside}")
    return rule.with_sizes({"g": groups}).with_local({"groups": ("g",)})


def canonical_convolution(call: TracedCall) -> list[str]:
    """The bias as an op of its own, as that of a linear."""
    rest = {name: value for name, value in call.arguments.items() if name != "bias"}
    bias = call.arguments.get("bias")
    if not call.is_value(bias):
        return call.emit(**rest)
    bias_info = call.info_of(bias)
    space = len(call.info_of(call.arguments["weight"]).shape) - 2  # the input may come without a batch
    shape = (*bias_info.shape, *[1] * space)
    y = call.emit_one(call.target, rest, call.info)
    info = call.describe(shape, bias_info.dtype)
    viewed = call.emit_one("aten.view.default", {"self": bias, "size": shape}, info, "bias_view")
    return call.emit("aten.add.Tensor", "bias", self=y, other=viewed)


def print_convolution(p: Printing) -> str:
    name = p.op.target.split(".")[1]
    if name == "convolution":
        name = f"conv{'_transpose' if p.literal('transposed', False) else ''}{len(p.literal('stride'))}d"
    bias = f", {p['bias']}" if p.has("bias") else ""
    extra = p.options("stride", "padding", "dilation", "groups")
    if "transpose" in name and p.has("output_padding"):
        extra += p.options("output_padding")
    return f"F.{name}({p['input']}, {p['weight']}{bias}{extra})"


def read_convolution(op: Op, node: ast.expr) -> Arguments:
    """`aten.convolution` is one op for all of them; what it is transposed by and over how many dims is in the name."""
    transposed = bool(op.argument("transposed"))
    dims = len(op.argument("stride"))
    order = "output_padding, groups, dilation" if transposed else "dilation, groups"
    name = f"conv{'_transpose' if transposed else ''}{dims}d"
    read = read_form(op, node, f"F.{name}(input, weight, bias, stride, padding, {order})")
    return read | {"transposed": ast.Constant(value=transposed)}


def leaves_out_padding(op: Op, name: str, value: Any) -> bool:
    return name == "output_padding" and (not op.argument("transposed") or not any(value))


def reordered_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """The CPU's kernels want another order of what they read and write, with channels in blocks of 16.

    Forward copies one of its inputs and outputs at a time, backward both; what lies in another order is copied before.
    """
    x, weight, y = call.inputs[0].bytes, call.inputs[1].bytes, call.outputs[0].bytes
    shapes = [signature.analysis.graph.values[name].shape for name in call.op.inputs[:2]]
    channels = shapes[0][1 - len(shapes[1])]
    blocked = x * (-channels % 16 + channels) / channels
    forward = max(blocked, y) + weight
    backward = blocked + y + 3 * weight
    if "transpose" in call.op.target or call.op.argument("transposed", False):
        forward += y
    if flat is not None and not flat[0]:
        forward, backward = forward + x, backward + x + y
    return forward, backward


CONVOLUTION = {"kernel": Kernel.CONVOLUTION, "saved": "0 1", "work": reordered_work}
STANDARD = {"canonical": canonical_convolution, "delays_weights": True, "prints": print_convolution, **CONVOLUTION}
FORM = "(input, weight, bias, stride, padding, dilation, groups)"
define("convolution", rule=convolution, folds_bias=True, reads=read_convolution, unsaid={"transposed": False},
       leaves_out=leaves_out_padding, **STANDARD)  # fmt: skip
define("conv1d", rule={"default padding": convolution}, folds_bias=True, dense=True, reads=f"F.conv1d{FORM}",
       **STANDARD)  # fmt: skip
define("conv2d", rule={"default padding": convolution}, folds_bias=True, reads=f"F.conv2d{FORM}", **STANDARD)
define("conv3d", rule={"default padding": convolution}, reads=f"F.conv3d{FORM}", **STANDARD)
define("conv_transpose1d", rule=convolution, canonical=canonical_convolution, **CONVOLUTION)
define("conv_transpose2d", rule={"input": convolution}, canonical=canonical_convolution, prints=print_convolution,
       reads="F.conv_transpose2d(input, weight, bias, stride, padding, output_padding, groups, dilation)",
       **CONVOLUTION)  # fmt: skip
define("conv_transpose3d", rule={"input": convolution}, **CONVOLUTION)
define("_convolution _convolution_mode _conv_depthwise2d conv_depthwise3d conv_tbc cudnn_convolution slow_conv3d "
       "cudnn_convolution_transpose mkldnn_convolution miopen_convolution slow_conv_transpose2d slow_conv_transpose3d "
       "thnn_conv2d", kernel=Kernel.CONVOLUTION, work=reordered_work)  # fmt: skip

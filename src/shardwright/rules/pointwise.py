"""Ops that work on each element by itself, with broadcasting. One table, not one rule each."""

from __future__ import annotations

from collections.abc import Sequence

from .dims import label_dims, stretched, write_rule
from .notation import Rule
from .registry import OpCall, rule

LINEAR_UNARY = (
    "neg clone contiguous alias detach positive lift_fresh_copy mul.Scalar div.Scalar rad2deg deg2rad real imag"
)
UNARY = (
    "abs acos acosh angle asin asinh atan atanh ceil celu clamp clamp_max clamp_min conj_physical cos cosh digamma elu "
    "erf erfc erfinv exp exp2 expm1 floor frac gelu hardshrink hardsigmoid hardswish hardtanh i0 isfinite isinf isnan "
    "isneginf isposinf isreal leaky_relu lgamma log log10 log1p log2 log_sigmoid logical_not logit mish nan_to_num "
    "reciprocal relu relu6 round round.decimals rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus "
    "softshrink special_entr special_erfcx special_expit special_i0e special_i1 special_i1e special_log_ndtr "
    "special_ndtr special_ndtri sqrt square tan tanh threshold trunc bitwise_not polygamma mvlgamma "
    "absolute negative arccos arcsin arctan arccosh arcsinh arctanh fix "
    "add.Scalar sub.Scalar rsub.Scalar pow.Tensor_Scalar pow.Scalar float_power.Tensor_Scalar remainder.Scalar "
    "remainder.Scalar_Tensor fmod.Scalar floor_divide.Scalar div.Scalar_mode xlogy.Scalar_Other xlogy.Scalar_Self "
    "eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar bitwise_and.Scalar bitwise_or.Scalar "
    "bitwise_xor.Scalar __lshift__.Scalar __rshift__.Scalar bitwise_left_shift.Tensor_Scalar "
    "bitwise_right_shift.Tensor_Scalar copysign.Scalar masked_fill.Scalar __and__.Scalar __or__.Scalar "
    "zeros_like ones_like full_like empty_like fill.Scalar"
)
BINARY = (
    "pow.Tensor_Tensor float_power.Tensor_Tensor maximum minimum max.other min.other fmax fmin eq.Tensor ne.Tensor "
    "lt.Tensor le.Tensor gt.Tensor ge.Tensor greater.Tensor less.Tensor logical_and logical_or logical_xor "
    "bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor bitwise_left_shift.Tensor bitwise_right_shift.Tensor "
    "atan2 arctan2 fmod.Tensor remainder.Tensor floor_divide div.Tensor_mode __and__.Tensor __or__.Tensor xlogy.Tensor "
    "special_xlog1py logaddexp logaddexp2 hypot copysign.Tensor heaviside nextafter gcd lcm isclose ldexp.Tensor "
    "clamp.Tensor clamp_min.Tensor clamp_max.Tensor masked_fill.Tensor "
    "addcmul addcdiv lerp.Tensor lerp.Scalar complex polar"
)


def full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def broadcast(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], groups: Sequence[int | None]) -> Rule:
    """The rule of a pointwise op: a label for each dim of the output, absent where an input is stretched."""
    names = label_dims(out)
    return write_rule([stretched(shape, out, names) for shape in shapes], [names], groups)


def pointwise(call: OpCall, groups: Sequence[int | None] | None = None) -> Rule:
    shapes = [value.shape for value in call.inputs]
    return broadcast(shapes, call.outputs[0].shape, groups or [None] * len(shapes))


@rule(*(full_name(name) for name in f"{UNARY} {BINARY}".split()))
def plain(call: OpCall) -> Rule:
    return pointwise(call)


@rule(*(full_name(name) for name in LINEAR_UNARY.split()))
def linear_unary(call: OpCall) -> Rule:
    return pointwise(call, [1])


@rule("aten.add.Tensor", "aten.sub.Tensor")
def add(call: OpCall) -> Rule:
    """Linear in both jointly; adding a number is not linear at all."""
    both = len(call.inputs) == 2
    return pointwise(call, [1, 1] if both else [None])


@rule("aten.rsub.Tensor")
def reverse_subtract(call: OpCall) -> Rule:
    return pointwise(call, [1, 1])


@rule("aten.mul.Tensor")
def multiply(call: OpCall) -> Rule:
    """Linear in each by itself. A value times itself is linear in neither."""
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, 2][: len(call.inputs)])


@rule("aten.div.Tensor")
def divide(call: OpCall) -> Rule:
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, None][: len(call.inputs)])


@rule("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(call: OpCall) -> Rule:
    """Jointly linear in the two branches if both are tensors."""
    groups: list[int | None] = [None] * len(call.inputs)
    if len(call.inputs) == 3:
        groups = [None, 1, 1]
    return pointwise(call, groups)


@rule("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default")
def cast(call: OpCall) -> Rule:
    """Linear from float to float and from int to float; rounding is not linear."""
    source, target = call.inputs[0], call.outputs[0]
    linear = target.floating or source.dtype == target.dtype
    return pointwise(call, [1 if linear else None, *[None] * (len(call.inputs) - 1)])


@rule("aten.native_dropout.default", "aten.dropout.default")
def dropout(call: OpCall) -> Rule:
    """Each element by itself; the mask is drawn by position (runtime.random)."""
    names = label_dims(call.shape)
    return write_rule([names], [names] * len(call.outputs), [1])


@rule("prelu")
def prelu(call: OpCall) -> Rule:
    """The slope belongs to dim 1, wherever the others are."""
    names = label_dims(call.shape)
    slope = names[1] if len(names) > 1 and call.inputs[1].shape == call.shape[1:2] else "1"
    return write_rule([names, [slope] * len(call.inputs[1].shape)], [names])


@rule("glu")
def glu(call: OpCall) -> Rule:
    """One half gates the other: the dim is (2, half), as in a split."""
    dim, names = call.dim("dim", -1), label_dims(call.outputs[0].shape)
    half = names[dim]
    source = [*names[:dim], "2" if half == "1" else f"(2 {half})", *names[dim + 1 :]]
    return write_rule([source], [names]).with_sizes({} if half == "1" else {half: call.outputs[0].shape[dim]})

"""Ops that work on each element by itself, with broadcasting. One table, not one rule each."""

from __future__ import annotations

from collections.abc import Sequence

from .notation import Rule, parse
from .registry import Call, letters, rule

LINEAR_UNARY = "neg clone contiguous alias detach positive lift_fresh_copy"
UNARY = (
    "relu gelu silu tanh sigmoid exp log log1p log2 expm1 sqrt rsqrt abs cos sin tan erf reciprocal sign round floor "
    "ceil trunc logical_not bitwise_not leaky_relu elu hardtanh hardswish hardsigmoid softplus mish selu celu relu6 "
    "log_sigmoid square isnan isinf isfinite clamp clamp_min clamp_max nan_to_num logit acos asin atan cosh sinh "
    "hardshrink softshrink threshold frac erfc lgamma digamma pow.Tensor_Scalar remainder.Scalar fmod.Scalar "
    "floor_divide.Scalar add.Scalar sub.Scalar rsub.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar "
    "ge.Scalar bitwise_and.Scalar bitwise_or.Scalar pow.Scalar zeros_like ones_like full_like empty_like "
    "masked_fill.Scalar __and__.Scalar __or__.Scalar"
)
BINARY = (
    "pow.Tensor_Tensor maximum minimum eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and "
    "logical_or logical_xor bitwise_and.Tensor bitwise_or.Tensor bitwise_xor.Tensor atan2 fmod.Tensor "
    "remainder.Tensor floor_divide div.Tensor_mode clamp.Tensor __and__.Tensor __or__.Tensor xlogy.Tensor "
    "logaddexp masked_fill.Tensor prelu hypot copysign.Tensor"
)


def full_name(name: str) -> str:
    return f"aten.{name}" if "." in name else f"aten.{name}.default"


def broadcast(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], groups: Sequence[int | None]) -> Rule:
    """The rule of a pointwise op: a label for each dim of the output, absent where an input is stretched."""
    names = letters(len(out))

    def term(shape: tuple[int, ...], group: int | None) -> str:
        shown = names[len(out) - len(shape) :]
        sizes = out[len(out) - len(shape) :]
        dims = [
            name if held == size and size != 1 else "1" for name, held, size in zip(shown, shape, sizes, strict=True)
        ]
        return " ".join(dims) + (f" ~{group}" if group is not None else "")

    result = " ".join(name if size != 1 else "1" for name, size in zip(names, out, strict=True))
    return parse(f"{', '.join(term(s, g) for s, g in zip(shapes, groups, strict=True))} -> {result}")


def pointwise(call: Call, groups: Sequence[int | None] | None = None) -> Rule:
    shapes = [value.shape for value in call.inputs]
    return broadcast(shapes, call.outputs[0].shape, groups or [None] * len(shapes))


@rule(*(full_name(name) for name in f"{UNARY} {BINARY}".split()))
def plain(call: Call) -> Rule:
    return pointwise(call)


@rule(*(full_name(name) for name in f"{LINEAR_UNARY} mul.Scalar div.Scalar".split()))
def linear_unary(call: Call) -> Rule:
    return pointwise(call, [1])


@rule("aten.add.Tensor", "aten.sub.Tensor")
def add(call: Call) -> Rule:
    """Linear in both jointly; adding a number is not linear at all."""
    both = len(call.inputs) == 2
    return pointwise(call, [1, 1] if both else [None])


@rule("aten.rsub.Tensor")
def reverse_subtract(call: Call) -> Rule:
    return pointwise(call, [1] * len(call.inputs) if len(call.inputs) == 2 else [None])


@rule("aten.mul.Tensor")
def multiply(call: Call) -> Rule:
    """Linear in each by itself. A value times itself is linear in neither."""
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, 2][: len(call.inputs)])


@rule("aten.div.Tensor")
def divide(call: Call) -> Rule:
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, None][: len(call.inputs)])


@rule("aten.where.self", "aten.where.ScalarSelf", "aten.where.ScalarOther", "aten.where.Scalar")
def where(call: Call) -> Rule:
    """Jointly linear in the two branches if both are tensors."""
    groups: list[int | None] = [None] * len(call.inputs)
    if len(call.inputs) == 3:
        groups = [None, 1, 1]
    return pointwise(call, groups)


@rule("aten._to_copy.default", "aten.to.dtype", "aten.type_as.default")
def cast(call: Call) -> Rule:
    """Linear from float to float and from int to float; rounding is not linear."""
    source, target = call.inputs[0], call.outputs[0]
    linear = target.floating or source.dtype == target.dtype
    return pointwise(call, [1 if linear else None, *[None] * (len(call.inputs) - 1)])


@rule("aten.addcmul.default", "aten.addcdiv.default", "aten.lerp.Tensor", "aten.lerp.Scalar")
def ternary(call: Call) -> Rule:
    return pointwise(call)


@rule("aten.native_dropout.default", "aten.dropout.default")
def dropout(call: Call) -> Rule:
    """Each element by itself; the mask is drawn by position (runtime.random)."""
    names = letters(len(call.shape))
    dims = " ".join(name if size != 1 else "1" for name, size in zip(names, call.shape, strict=True))
    return parse(f"{dims} ~1 -> {', '.join([dims] * len(call.outputs))}")

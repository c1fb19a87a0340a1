"""Ops that work on each element by itself, with broadcasting."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..ir import Dtype
from ..rules.dims import label_dims, stretched, write_rule
from ..rules.notation import Rule
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import LocalCall, Passes, TracedCall
from .printing import Printing, bracketed, function, functional, method
from .spec import Kernel, OpSpec, Work, define

PASSED_ON = Passes(results=0, gradients=0)
"""A gradient that goes on as it is: no kernel; what was stretched is summed (see `cost/time.py`)."""

GRADIENT_ONLY = Passes(gradients=1)
"""Only the gradient is read: nothing was saved."""

MASKED = Passes(results=1.5, gradients=1)
"""And a mask of 1 byte."""


def broadcast(shapes: Sequence[tuple[int, ...]], out: tuple[int, ...], groups: Sequence[int | None]) -> Rule:
    """The rule of a pointwise op: a label for each dim of the output, absent where an input is stretched."""
    names = label_dims(out)
    return write_rule([stretched(shape, out, names) for shape in shapes], [names], groups)


def pointwise(call: OpCall, groups: Sequence[int | None] | None = None) -> Rule:
    shapes = [value.shape for value in call.inputs]
    return broadcast(shapes, call.outputs[0].shape, groups or [None] * len(shapes))


def plain(call: OpCall) -> Rule:
    """Any number of tensors, linear in none."""
    return pointwise(call)


def linear_unary(call: OpCall) -> Rule:
    return pointwise(call, [1])


def elementwise(names: str, overloads: str = "default", /, **fields: Any) -> OpSpec:
    """Define ops whose overloads all work on each element by itself."""
    return define(names, **{"rule": {overloads: plain}, "keeps_order": True, "strided": True, **fields})


# -- functions of one tensor, by what backward reads

FUNCTION = {"kernel": Kernel.FUNCTION}
define("deg2rad rad2deg", rule=linear_unary, keeps_order=True, strided=True)
define("neg", rule=linear_unary, keeps_order=True, strided=True, saved="", passes=GRADIENT_ONLY, prints=method)

elementwise("celu elu mish selu softplus", saved="0", **FUNCTION)
# derivatives that autograd computes by several ops, each with a result of its own
elementwise("log sin", saved="0", prints=method, work=(0.0, 1.0), **FUNCTION)
elementwise("cosh lgamma log10 log1p log2 sinh", saved="0", work=(0.0, 1.0), **FUNCTION)
elementwise("cos", saved="0", prints=method, work=(0.0, 2.0), **FUNCTION)
elementwise("atan tan", saved="0", work=(0.0, 2.0), **FUNCTION)
elementwise("erf", saved="0", prints=method, work=(0.0, 4.0), **FUNCTION)
elementwise("acos asin erfc erfinv", saved="0", work=(0.0, 5.0), **FUNCTION)
elementwise("log_sigmoid", saved="0", saved_extra=lambda call, signature: call.outputs[0].bytes, **FUNCTION)
elementwise("gelu", saved="0", prints=functional("gelu", "self", options=("approximate",)),
            reads="F.gelu(self, approximate)", positional=1, **FUNCTION | {"strided": False})  # fmt: skip
elementwise("silu", saved="0", prints=functional("silu", "self"), reads="F.silu(self)", **FUNCTION)
elementwise("abs", saved="0", prints=method, work=(0.0, 1.0))
elementwise("square", saved="0", prints=method, work=(0.0, 2.0))
elementwise("hardshrink hardsigmoid hardswish hardtanh leaky_relu logit relu6 softshrink threshold", saved="0")
elementwise("absolute digamma nan_to_num", saved="0", work=(0.0, 1.25))
elementwise("sinc", saved="0", work=(0.0, 7.0))

elementwise("exp sigmoid tanh", saved="r", prints=method, **FUNCTION)
elementwise("exp2 expm1", saved="r", work=(0.0, 1.0), **FUNCTION)
elementwise("relu", saved="r", prints=functional("relu", "self"), reads="F.relu(self)")
elementwise("sqrt", saved="r", prints=method, work=(0.0, 1.0))
elementwise("reciprocal rsqrt", saved="r", prints=method, work=(0.0, 2.0))

elementwise("ceil floor sign", saved="", prints=method)
elementwise("round", "default decimals", saved="", prints=method)
elementwise("trunc", saved="")
elementwise("bitwise_not logical_not", prints=function)
elementwise("acosh angle arccos arccosh arcsin arcsinh arctan arctanh asinh atanh conj_physical fix frac i0 isfinite "
            "isinf isnan isneginf isposinf isreal mvlgamma negative polygamma sgn signbit special_entr special_erfcx "
            "special_expit special_i0e special_i1 special_i1e special_log_ndtr special_ndtr special_ndtri")  # fmt: skip

# -- functions of several tensors, or of a tensor and a number


def saved_power(call: LocalCall, signature: Signature, flat: object) -> str:
    return "0 1 r" if call.op.target.endswith("Tensor_Tensor") else "0"


def power_work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
    """x ** (n - 1), then * n; for an exponent with a gradient a logarithm, and masks of where it is defined."""
    return 0.0, (4.25 if call.op.target.endswith("Tensor_Tensor") else 2.0) * call.outputs[0].bytes


elementwise("pow", "Scalar Tensor_Scalar Tensor_Tensor", saved=saved_power, work=power_work,
            operator={"Tensor_Scalar": "**", "Tensor_Tensor": "**"}, **FUNCTION)  # fmt: skip
elementwise("float_power", "Tensor_Scalar Tensor_Tensor")
elementwise("atan2", saved="0 1", work=(0.0, 5.0), **FUNCTION)
elementwise("maximum minimum", saved="0 1", prints=function, work=(0.0, 1.5))
elementwise("fmax fmin", saved="0 1", work=(0.0, 0.5))
elementwise("logaddexp", saved="0 1", work=(0.0, 3.0))
elementwise("clamp clamp_max clamp_min", "default Tensor", saved="0", prints=function, work=(0.0, 1.25))
elementwise("xlogy", "Scalar_Other Scalar_Self Tensor", saved="0", work=(0.0, 2.75))
elementwise("logical_and logical_or", prints=function)
elementwise("remainder", "Scalar Scalar_Tensor Tensor")
elementwise("floor_divide", "default Scalar")
elementwise("__lshift__ __rshift__", "Scalar")
elementwise("bitwise_left_shift bitwise_right_shift", "Tensor Tensor_Scalar")
elementwise("greater ldexp less", "Tensor")
elementwise("bitwise_xor copysign fmod lerp", "Scalar Tensor")
elementwise("addcdiv addcmul arctan2 complex gcd heaviside hypot isclose lcm logaddexp2 logical_xor nextafter polar "
            "special_xlog1py")  # fmt: skip
for _name, _sign in (("eq", "=="), ("ne", "!="), ("lt", "<"), ("le", "<="), ("gt", ">"), ("ge", ">=")):
    elementwise(_name, "Scalar Tensor", operator={"Scalar": _sign, "Tensor": _sign})


def canonical_bitwise(call: TracedCall) -> list[str]:
    word = call.target.split("__")[1]
    return call.emit(f"aten.bitwise_{word}.{call.target.rsplit('.', 1)[1]}", **call.arguments)


for _name, _sign in (("and", "&"), ("or", "|")):
    elementwise(f"bitwise_{_name}", "Scalar Tensor", operator={"Tensor": _sign})
    elementwise(f"__{_name}__", "Scalar Tensor", operator={"Tensor": _sign}, canonical=canonical_bitwise)
define("__xor__", canonical=canonical_bitwise)

# -- choosing between tensors


def where(call: OpCall) -> Rule:
    """Jointly linear in the two branches if both are tensors."""
    groups: list[int | None] = [None] * len(call.inputs)
    if len(call.inputs) == 3:
        groups = [None, 1, 1]
    return pointwise(call, groups)


def print_where(p: Printing) -> str:
    return f"torch.where({p['condition']}, {p['self']}, {p['other']})"


def stretched_work(backward: float = 0.0) -> Work:
    """Backward makes the gradients of stretched inputs at full size, then sums them."""

    def work(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> tuple[float, float]:
        out = call.outputs[0]
        stretched = sum(tensor.gradient and tensor.elements < out.elements for tensor in call.inputs)
        return 0.0, (stretched + (backward if len(call.inputs) > 1 else 0.0)) * out.bytes

    return work


define("where", rule={"self Scalar ScalarSelf ScalarOther": where}, keeps_order=True, strided=True, saved="0",
       passes=MASKED, work=stretched_work(), prints=print_where,
       reads="torch.where(condition, self, other)")  # fmt: skip
elementwise("masked_fill", "Scalar Tensor", saved="1", passes=MASKED, prints=function)

# -- casts and copies


def cast(call: OpCall) -> Rule:
    """Linear from float to float and from int to float; rounding is not linear."""
    source, target = call.inputs[0], call.outputs[0]
    linear = target.floating or source.dtype == target.dtype
    return pointwise(call, [1 if linear else None, *[None] * (len(call.inputs) - 1)])


def canonical_cast(call: TracedCall) -> list[str]:
    if call.input_info.dtype == call.info.dtype:
        return call.identity(call.first)
    return call.emit("aten._to_copy.default", self=call.first, dtype=Dtype(call.info.dtype))


def print_cast(p: Printing) -> str:
    return f"{bracketed(p.first())}.to({p['dtype']})"


CAST = {"canonical": canonical_cast, "keeps_order": True, "saved": "", "passes": GRADIENT_ONLY, "result": "0"}
define("_to_copy", rule=cast, prints=print_cast, reads="x.to(dtype)", **CAST)
define("_autocast_to_full_precision _autocast_to_reduced_precision", canonical=canonical_cast)


def canonical_identity(call: TracedCall) -> list[str]:
    return call.identity(call.first)


def canonical_restride(call: TracedCall) -> list[str]:
    """Values have no strides here; a view that relied on these becomes a reshape."""
    call.loosen(call.first)
    return call.identity(call.first)


COPY = {"rule": linear_unary, "keeps_order": True, "saved": ""}
define("clone", canonical=canonical_restride, passes=PASSED_ON, back="pass", prints=method, **COPY)
define("lift_fresh_copy", canonical=canonical_identity, passes=PASSED_ON, **COPY)
define("data resolve_conj resolve_neg", canonical=canonical_identity)

# -- with a parameter


def prelu(call: OpCall) -> Rule:
    """The slope belongs to dim 1, wherever the others are."""
    names = label_dims(call.shape)
    slope = names[1] if len(names) > 1 and call.inputs[1].shape == call.shape[1:2] else "1"
    return write_rule([names, [slope] * len(call.inputs[1].shape)], [names])


def glu(call: OpCall) -> Rule:
    """One half gates the other: the dim is (2, half), as in a split."""
    dim, names = call.dim("dim", -1), label_dims(call.outputs[0].shape)
    half = names[dim]
    source = [*names[:dim], "2" if half == "1" else f"(2 {half})", *names[dim + 1 :]]
    return write_rule([source], [names]).with_sizes({} if half == "1" else {half: call.outputs[0].shape[dim]})


define("prelu", rule=prelu, saved="0 1", work=(0.0, 1.0))
define("glu", rule=glu, saved="0")

"""Sums, differences, products and quotients of elements: linear in some of their inputs."""

from __future__ import annotations

from collections.abc import Sequence

from ..rules.notation import Rule
from ..rules.registry import OpCall
from ..rules.signature import Signature
from .contexts import LocalCall, TracedCall
from .pointwise import PASSED_ON, linear_unary, plain, pointwise, stretched_work
from .spec import Rewriting, define


def add(call: OpCall) -> Rule:
    """Linear in both jointly; adding a number is not linear at all."""
    both = len(call.inputs) == 2
    return pointwise(call, [1, 1] if both else [None])


def reverse_subtract(call: OpCall) -> Rule:
    return pointwise(call, [1, 1])


def multiply(call: OpCall) -> Rule:
    """Linear in each by itself. A value times itself is linear in neither."""
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, 2][: len(call.inputs)])


def divide(call: OpCall) -> Rule:
    if len(call.inputs) == 2 and call.inputs[0].name == call.inputs[1].name:
        return pointwise(call)
    return pointwise(call, [1, None][: len(call.inputs)])


def drop_neutral(neutral: int) -> Rewriting:
    """Times one and plus zero go, where they also leave dtype and shape alone."""

    def canonical(call: TracedCall) -> list[str]:
        other = call.arguments.get("other")
        same = call.is_value(call.arguments["self"]) and (call.input_info.shape, call.input_info.dtype) == (
            call.info.shape,
            call.info.dtype,
        )
        exact = neutral == 1 or not call.info.floating
        if same and exact and not (call.is_value(other) or isinstance(other, bool)) and other == neutral:
            return call.identity(call.first)
        return call.keep()

    return canonical


def saved_product(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> str:
    return "0* 1*" if len(call.inputs) > 1 else ""


def saved_quotient(call: LocalCall, signature: Signature, flat: Sequence[bool] | None) -> str:
    """A number divides without being kept."""
    return "" if len(call.inputs) < 2 else "0 1" if call.inputs[1].gradient else "1"


STRIDED = {"keeps_order": True, "strided": True}
ADDED = {"saved": "", "passes": PASSED_ON, "work": stretched_work(), **STRIDED}
define("add", rule={"Tensor": add, "Scalar": plain}, operator={"Tensor": "+", "Scalar": "+"},
       canonical={"Tensor": drop_neutral(0)}, unsaid={"alpha": 1}, back="pass_same", **ADDED)  # fmt: skip
define("sub", rule={"Tensor": add, "Scalar": plain}, operator={"Tensor": "-", "Scalar": "-"},
       canonical={"Tensor": drop_neutral(0)}, unsaid={"alpha": 1}, back="pass_same fresh", **ADDED)  # fmt: skip
define("rsub", rule={"Tensor": reverse_subtract, "Scalar": plain}, back="fresh pass_same", **ADDED)
define("mul", rule={"Tensor": multiply, "Scalar": linear_unary}, operator={"Tensor": "*", "Scalar": "*"},
       canonical={"Tensor": drop_neutral(1)}, saved=saved_product, work=stretched_work(), **STRIDED)  # fmt: skip
define("div", rule={"Tensor": divide, "Scalar": linear_unary, "Tensor_mode Scalar_mode": plain},
       operator={"Tensor": "/", "Scalar": "/"}, canonical={"Tensor": drop_neutral(1)},
       saved=saved_quotient, work=stretched_work(2.0), **STRIDED)  # fmt: skip

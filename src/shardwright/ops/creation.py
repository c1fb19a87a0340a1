"""Tensors that are made of nothing but arguments, and those that have the shape of another."""

from __future__ import annotations

from typing import Any

from ..ir import Dtype, Op
from .contexts import ProgramOnRank, TracedCall
from .pointwise import elementwise
from .printing import Printing, function
from .spec import Kernel, define


def canonical_creation(call: TracedCall) -> list[str]:
    return call.emit(**{**call.arguments, "dtype": Dtype(call.info.dtype)})


def canonical_like(call: TracedCall) -> list[str]:
    arguments = {name: value for name, value in call.arguments.items() if name != "dtype"}
    if call.input_info.dtype != call.info.dtype:
        arguments["dtype"] = Dtype(call.info.dtype)
    return call.emit(**arguments)


def canonical_new(call: TracedCall) -> list[str]:
    kind = call.target.split(".")[1].removeprefix("new_").removesuffix("_strided")
    target = f"aten.{kind}.{'memory_format' if kind == 'empty' else 'default'}"
    arguments: dict[str, Any] = {"size": call.info.shape}
    if kind == "full":
        arguments["fill_value"] = call.arguments["fill_value"]
    return call.emit(target, **arguments, dtype=Dtype(call.info.dtype))


def canonical_copy(call: TracedCall) -> list[str]:
    """What `x.copy_(y)` leaves in x: y, cast and expanded to x."""
    return _copied(call, call.arguments["src"])


def _copied(call: TracedCall, source: Any) -> list[str]:
    info = call.describe(call.info_of(source).shape, call.info.dtype)
    (converted,) = call.write("aten._to_copy.default", {"self": source}, [info])
    return call.write("aten.expand.default", {"self": call.reference(converted)}, call.infos)


def canonical_fill(call: TracedCall) -> list[str]:
    value = call.arguments.get("value", 0)
    if call.input_info.gradient:  # which is zero, and not none
        target = "aten.fill.Tensor" if call.is_value(value) else "aten.fill.Scalar"
        return call.emit(target, self=call.first, value=value)
    if call.is_value(value):
        return _copied(call, value)
    dtype = Dtype(call.info.dtype)
    return call.emit("aten.full.default", size=call.info.shape, fill_value=value, dtype=dtype)


# -- on a rank, where they are made whole, and in generated code


def local_range(program: ProgramOnRank, op: Op) -> Op:
    counts = op.target == "aten.arange.default" and type(op.argument("end")) is int
    return op.with_arguments(end=program.sizes_of(op.outputs[0])[0]) if counts else op


def local_filled(program: ProgramOnRank, op: Op) -> Op:
    return op.with_arguments(size=program.sizes_of(op.outputs[0])) if op.argument("size") else op


def print_range(p: Printing) -> str:
    """Whole numbers are int64 anyway."""
    whole = p.op.target == "aten.arange.default" and type(p.literal("end")) is not float
    return f"torch.arange({p['end']})" if whole and p.literal("dtype") == "int64" else function(p)


def counts_by_itself(op: Op, name: str, value: Any) -> bool:
    """Whether torch takes a dtype by itself: int64, if there is no float among the numbers."""
    return name == "dtype" and value == "int64" and not any(isinstance(number, float) for _, number in op.arguments)


# -- definitions


CREATION = {"canonical": canonical_creation, "kernel": Kernel.CREATION}
define("arange", localize=local_range, prints=print_range, leaves_out=counts_by_itself, **CREATION)
define("full ones zeros", localize=local_filled, prints=function, **CREATION)
define("empty eye linspace scalar_tensor", **CREATION)
define("tril_indices triu_indices", kernel=Kernel.CREATION)
define("new_full new_ones new_zeros", canonical=canonical_new, saved="")
define("empty_strided new_empty new_empty_strided", canonical=canonical_new)
elementwise("full_like ones_like zeros_like", canonical=canonical_like, gradient="none", saved="", prints=function)
elementwise("empty_like", canonical=canonical_like, gradient="none", saved="")
elementwise("fill", "Scalar", canonical=canonical_fill)
define("zero", canonical=canonical_fill)
define("copy", canonical=canonical_copy)

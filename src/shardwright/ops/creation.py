"""Tensors that are made of nothing but arguments, and those that have the shape of another."""

from __future__ import annotations

from typing import Any

from ..ir import Dtype
from .contexts import TracedCall
from .pointwise import elementwise
from .printing import function
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


define("arange full ones zeros", canonical=canonical_creation, kernel=Kernel.CREATION, prints=function)
define("empty eye linspace scalar_tensor", canonical=canonical_creation, kernel=Kernel.CREATION)
define("tril_indices triu_indices", kernel=Kernel.CREATION)
define("new_full new_ones new_zeros", canonical=canonical_new, saved="")
define("empty_strided new_empty new_empty_strided", canonical=canonical_new)
elementwise("full_like ones_like zeros_like", canonical=canonical_like, gradient="none", saved="", prints=function)
elementwise("empty_like", canonical=canonical_like, gradient="none", saved="")
elementwise("fill", "Scalar", canonical=canonical_fill)
define("zero", canonical=canonical_fill)
define("copy", canonical=canonical_copy)

"""Numbers that a model takes out of its tensors (`loss.item()`) and computes with, or returns.

A graph has tensors only. So such a number is a value of no dims, without gradient, in the dtype that Python's numbers
have (float64, int64, bool). Arithmetic of numbers is arithmetic of these; where a number meets a tensor, it is cast to
the dtype that torch would compute in with a number of Python, since a tensor without dims could change that dtype:

    scale = y.abs().max().item()      scale = y.abs().max().detach().double()
    z = y / (scale + 1e-5)            z = y / (scale + 1e-5).to(y.dtype)
    return z, scale                   return z, scale            (which becomes a number at the border)

A number that decides a size or a branch is refused, as ever. A division of numbers by zero gives an infinity.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...ir import Dtype
from ..building.aliases import TensorHandle
from ..building.canonical import AtenCall, write
from ..building.graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef
from ..building.schema import target_name
from ..failure import unsupported

aten: Any = torch.ops.aten

_ARITHMETIC: dict[Any, Any] = {
    operator.add: aten.add.Tensor, operator.sub: aten.sub.Tensor, operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor, operator.mod: aten.remainder.Tensor, operator.neg: aten.neg.default,
    operator.abs: aten.abs.default, operator.lt: aten.lt.Tensor, operator.le: aten.le.Tensor,
    operator.gt: aten.gt.Tensor, operator.ge: aten.ge.Tensor, operator.eq: aten.eq.Tensor, operator.ne: aten.ne.Tensor,
    torch.sym_max: aten.maximum.default, torch.sym_min: aten.minimum.default, torch.sym_not: aten.logical_not.default,
    operator.and_: aten.logical_and.default, operator.or_: aten.logical_or.default,
    torch.sym_float: None, torch.sym_sqrt: aten.sqrt.default,
}  # fmt: skip
_BINARY = "add sub mul div true_divide floor_divide remainder fmod eq ne lt le gt ge".split()
_COMPARISONS = frozenset("eq ne lt le gt ge".split())
_TENSOR_FORMS = {
    **{f"aten.{name}{mark}.Scalar": f"{name}{mark}.Tensor" for name in _BINARY for mark in ("", "_")},
    **{f"aten.{name}{mark}.Tensor": f"{name}{mark}.Tensor" for name in _BINARY for mark in ("", "_")},
    "aten.div.Tensor_mode": "div.Tensor_mode",
    "aten.pow.Tensor_Scalar": "pow.Tensor_Tensor",
    "aten.pow.Scalar": "pow.Tensor_Tensor",
    "aten.clamp.default": "clamp.Tensor",
    "aten.clamp_min.default": "clamp_min.Tensor",
    "aten.clamp_max.default": "clamp_max.Tensor",
    "aten.masked_fill.Scalar": "masked_fill.Tensor",
    "aten.masked_fill_.Scalar": "masked_fill_.Tensor",
    "aten.fill_.Scalar": "fill_.Tensor",
    "aten.fill.Scalar": "fill.Tensor",
    "aten.where.ScalarOther": "where.self",
    "aten.where.ScalarSelf": "where.self",
    "aten.where.Scalar": "where.self",
    "aten.lerp.Scalar": "lerp.Tensor",
}
"""Ops that take a number, and the form of them that takes a tensor instead."""
_FILLED = frozenset({"aten.full.default", "aten.full_like.default", "aten.new_full.default",
                     "aten.scalar_tensor.default"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Number:
    """A number that was taken out of a tensor, as a value without dims."""

    name: str
    dtype: str  # float64, int64 or bool


@dataclass(frozen=True, slots=True)
class Numbers:
    """One node of a trace that makes a number, or computes with some."""

    builder: GraphBuilder
    place: OpOrigin

    def take(self, tensor: TensorHandle) -> Number:
        """`tensor.item()`"""
        name = tensor.read()
        info = self.builder.infos[name]
        floating = info.dtype.startswith(("float", "bfloat"))
        if info.dtype.startswith("complex"):
            raise self._refusal("a complex number")
        name = self._write("aten.detach.default", {"self": ValueRef(name)}, ValueInfo(info.shape, info.dtype))
        if info.shape:
            name = self._write("aten.reshape.default", {"self": ValueRef(name), "shape": ()}, ValueInfo((), info.dtype))
        wide = "bool" if info.dtype == "bool" else "float64" if floating else "int64"
        return Number(self._cast(name, wide), wide)

    def count(self, mask: str) -> Number:
        """How many elements a mask selects."""
        return Number(self._write("aten.sum.default", {"self": ValueRef(mask)}, ValueInfo((), "int64")), "int64")

    def compute(self, function: Callable[..., Any], args: Sequence[Any], value: Any) -> Number:
        """Arithmetic of Python on numbers; `value` is the symbol that it gives."""
        if function not in _ARITHMETIC:
            raise self._refusal(f"{getattr(function, '__name__', function)} of a number")
        kind = _kind(value)
        dtypes = [_kind(argument) if not isinstance(argument, Number) else argument.dtype for argument in args]
        wide = "float64" if "float64" in (*dtypes, kind) else "int64" if "int64" in dtypes else "bool"
        names = [self._as(argument, wide) for argument in args]
        op = _ARITHMETIC[function]
        if op is None:
            return Number(names[0], wide)
        arguments = {a.name: ValueRef(name) for a, name in zip(op._schema.arguments, names, strict=False)}
        return Number(self._write(target_name(op), arguments, ValueInfo((), kind)), kind)

    def apply(self, op: Any, args: Sequence[Any], kwargs: dict[str, Any], value: Any, tensors: Sequence[Any]) -> Any:
        """The op with tensors in the places of numbers, and its arguments; or a handle, if that is all.

        `value` is what the op gives, `tensors` are those that it is given, both as the trace has them.
        """
        target = target_name(op)
        named = {a.name: argument for a, argument in zip(op._schema.arguments, args, strict=False)} | dict(kwargs)
        if target in _FILLED and isinstance(named.get("fill_value", named.get("s")), Number):
            return self._filled(named.get("fill_value", named.get("s")), value)
        other = named.get("alpha", 1)
        if target.startswith("aten.rsub.") and other == 1:
            op, named = aten.sub.Tensor, {"self": named["other"], "other": named["self"]}
        elif target in _TENSOR_FORMS:
            name, _, overload = _TENSOR_FORMS[target].partition(".")
            op = getattr(getattr(aten, name), overload)
        else:
            raise self._refusal(f"{target} with a number that was taken out of a tensor")
        first = next((tensor for tensor in tensors if isinstance(tensor, torch.Tensor)), None)
        compares = op._opname.rstrip("_") in _COMPARISONS
        dtype = _name(value.dtype if not compares or first is None else self._common(first, named))
        wanted = {a.name: str(a.type) for a in op._schema.arguments}
        converted = {key: self._tensor(argument, dtype, wanted[key]) for key, argument in named.items()}
        if any(isinstance(argument, Number) for argument in pytree.tree_leaves(converted)):
            raise self._refusal(f"{target} with a number that was taken out of a tensor")
        return op, converted

    def _tensor(self, argument: Any, dtype: str, wanted: str) -> Any:
        if "Tensor" not in wanted or isinstance(argument, TensorHandle) or argument is None:
            return argument
        return TensorHandle(self._as(argument, dtype))

    def _common(self, tensor: torch.Tensor, named: dict[str, Any]) -> torch.dtype:
        """The dtype that a tensor is compared in with a number of Python."""
        kinds = {argument.dtype for argument in named.values() if isinstance(argument, Number)}
        return torch.result_type(tensor, 1.0 if "float64" in kinds else 1 if "int64" in kinds else True)

    def _filled(self, number: Any, value: torch.Tensor) -> TensorHandle:
        name = self._cast(number.name, _name(value.dtype))
        if value.dim():
            size = tuple(int(length) for length in value.shape)
            name = self._write(
                "aten.expand.default", {"self": ValueRef(name), "size": size}, ValueInfo(size, _name(value.dtype))
            )
        return TensorHandle(self._write("aten.clone.default", {"self": ValueRef(name)}, self.builder.infos[name]))

    def _as(self, argument: Any, dtype: str) -> str:
        """A number, or a literal, as a value of a dtype."""
        if isinstance(argument, Number):
            return self._cast(argument.name, dtype)
        arguments = {"size": (), "fill_value": argument, "dtype": Dtype(dtype)}
        return self._write("aten.full.default", arguments, ValueInfo((), dtype))

    def _cast(self, name: str, dtype: str) -> str:
        if self.builder.infos[name].dtype == dtype:
            return name
        return self._write(
            "aten._to_copy.default", {"self": ValueRef(name), "dtype": Dtype(dtype)}, ValueInfo((), dtype)
        )

    def _write(self, target: str, arguments: dict[str, Any], info: ValueInfo) -> str:
        return write(AtenCall(self.builder, target, arguments, [info], self.place))[0]

    def _refusal(self, what: str) -> Exception:
        return unsupported(
            f"the graph has no way to say {what}",
            self.place.source,
            "Keep it a tensor (leave .item() out), compute it outside of the model and pass it, or keep the submodule "
            "out of the graph with sw.opaque(submodule).",
        )


def numbers(tree: Any) -> list[Number]:
    """The numbers among some arguments."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Number)]


def _kind(value: Any) -> str:
    if isinstance(value, torch.SymBool | bool):
        return "bool"
    return "float64" if isinstance(value, torch.SymFloat | float) else "int64"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

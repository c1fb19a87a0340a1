"""Ops that write, as their functional twins: "aten.add.Tensor" for "aten.add_.Tensor" and for "aten.add.out".

What such an op would have written becomes the new value of the tensors that it writes to (aliases.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..failure import unsupported
from ..interpret import filled
from .aliases import TensorHandle
from .canonical import AtenCall, write
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef, map_refs
from .schema import target_name, value_infos

_VIEWS_IN_PLACE = frozenset("squeeze_ unsqueeze_ t_ transpose_ swapaxes_ swapdims_".split())
_SPECIAL = {"normal_": "aten.normal_functional.default", "zero_": "aten.zero.default"}


def written_arguments(op: Any) -> list[str]:
    """The arguments that an op writes to."""
    return [a.name for a in op._schema.arguments if a.alias_info is not None and a.alias_info.is_write]


def view_in_place(op: Any) -> Any:
    """The op that makes a view, for one that makes its argument that view: "squeeze" for "squeeze_"."""
    if op._opname not in _VIEWS_IN_PLACE:
        return None
    packet = getattr(torch.ops.aten, op._opname.removesuffix("_"), None)
    names = (op._overloadname, "int") if op._overloadname == "default" else (op._overloadname,)
    return next((getattr(packet, name) for name in names if packet is not None and name in packet.overloads()), None)


def write_to(
    builder: GraphBuilder, op: Any, arguments: dict[str, Any], written: Mapping[str, TensorHandle], place: OpOrigin
) -> Any:
    """Put an op that writes into the draft; the handles that it returns."""
    if all(a.kwarg_only for a in op._schema.arguments if a.name in written):
        return _write_out(builder, op, arguments, written, place)
    twin = in_place_twin(op)
    if twin is None or len(written) != 1:
        remedy = "Write it out of place, or keep the submodule out with sw.opaque(submodule)."
        raise unsupported(f"{target_name(op)} writes in place and has no functional form", place.source, remedy)
    (handle,) = written.values()
    info = builder.infos[handle.read()]
    name = write(AtenCall(builder, twin, arguments, [ValueInfo(info.shape, info.dtype)], place))[0]
    handle.write(builder, name, place)
    builder.loose.update((name, handle.root().name))
    return handle


def _write_out(
    builder: GraphBuilder, op: Any, arguments: dict[str, Any], written: Mapping[str, TensorHandle], place: OpOrigin
) -> Any:
    """An op that writes to `out=`. What its twin makes is cast as it would be when written there."""
    twin = _out_twin(op, written)
    handles = list(written.values())
    inputs = {name: value for name, value in arguments.items() if name not in written}
    infos = value_infos(_try(builder, twin, inputs), place.source) if twin is not None else []
    wanted = [builder.infos[handle.read()] for handle in handles]
    if [info.shape for info in infos] != [info.shape for info in wanted]:
        remedy = "Assign what it returns instead, or keep the submodule out with sw.opaque(submodule)."
        raise unsupported(f"{target_name(op)} resizes its out=, or has no form without", place.source, remedy)
    names = write(AtenCall(builder, target_name(twin), inputs, infos, place))
    for handle, name, info in zip(handles, names, wanted, strict=True):
        cast = AtenCall(builder, "aten._to_copy.default", {"self": ValueRef(name)}, [info], place)
        handle.write(builder, write(cast)[0], place)
        builder.loose.update((handle.name, handle.root().name))
    return handles[0] if len(handles) == 1 else handles


def _try(builder: GraphBuilder, op: Any, arguments: dict[str, Any]) -> Any:
    """What an op makes of tensors of these shapes."""

    def empty(ref: ValueRef) -> torch.Tensor:
        info = builder.infos[ref.name]
        return torch.empty(info.shape, dtype=getattr(torch, info.dtype), device="meta")

    return op(**{name: filled(map_refs(value, empty), ()) for name, value in arguments.items()})


def in_place_twin(op: Any) -> str | None:
    """The op "aten.add.Tensor" for "aten.add_.Tensor", "aten.__or__" for "aten.__ior__", if there is such an op."""
    name = op._opname
    name = f"__{name[3:]}" if name.startswith("__i") else name.removesuffix("_")
    if op._opname in _SPECIAL:
        return _SPECIAL[op._opname]
    packet = getattr(torch.ops.aten, name, None) if op.namespace == "aten" and name != op._opname else None
    overload = getattr(packet, op._overloadname, None) if packet is not None else None
    return target_name(overload) if overload is not None else None


def _out_twin(op: Any, written: Mapping[str, TensorHandle]) -> Any:
    """The overload that takes the same arguments but for `out=`, and returns what would be written there."""
    if op.namespace != "aten":
        return None
    wanted = [(a.name, str(a.type)) for a in op._schema.arguments if a.name not in written]
    packet = getattr(torch.ops.aten, op._opname)
    for overload in (getattr(packet, name) for name in packet.overloads()):
        schema = overload._schema
        if not schema.is_mutable and [(a.name, str(a.type)) for a in schema.arguments] == wanted:
            return overload
    return None

"""Memory offsets as element numbers: accesses by stride become lookups by index, since values have no strides here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ir import Dtype
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef


def element_numbers(
    builder: GraphBuilder, size: Sequence[int], strides: Sequence[int], offset: int, place: OpOrigin
) -> ValueRef:
    """The numbers that offset + i * stride + j * stride + ... goes through, as a constant of the graph."""

    def emit(target: str, shape: Sequence[int], arguments: dict[str, Any]) -> ValueRef:
        return ValueRef(builder.emit_one(f"aten.{target}", arguments, ValueInfo(tuple(shape), "int64"), place))

    total = emit("full.default", (), {"size": (), "fill_value": offset, "dtype": Dtype("int64")})
    for dim, (count, stride) in enumerate(zip(size, strides, strict=True)):
        shape = tuple(count if at == dim else 1 for at in range(len(size)))
        row = emit("arange.default", (count,), {"end": count, "dtype": Dtype("int64")})
        row = emit("mul.Scalar", (count,), {"self": row, "other": stride})
        row = emit("reshape.default", shape, {"self": row, "shape": shape})
        total = emit("add.Tensor", (*size[: dim + 1], *shape[dim + 1 :]), {"self": total, "other": row})
    return total

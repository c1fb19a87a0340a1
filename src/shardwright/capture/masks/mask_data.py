"""Document ids and padding as attention takes them: one row for each sample, whatever shape a mask has them in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..building.graph_builder import DraftOp, GraphBuilder, OpOrigin, ValueInfo, ValueRef, base_name
from .predicates import Affine, Place, index
from .structure import NotStructured


@dataclass(slots=True)
class MaskData:
    """Puts ops before an attention op that reads their results; what several attention ops read is made once."""

    builder: GraphBuilder
    steps: list[DraftOp]  # those before the attention op
    known: dict[object, str] = field(default_factory=dict)

    def row(self, value: str, places: Sequence[Place], shape: Sequence[int], origin: OpOrigin) -> ValueRef:
        """A value that is read at a sample and a position, as [batch or 1, positions]."""
        sizes = self.builder.infos[value].shape
        batched = {_is_batched(place, sizes, shape) for place in places}
        if len(batched) != 1:
            raise _no_rows(sizes)
        rows = (shape[0] if batched == {True} else 1, sizes[-1])
        return ValueRef(value) if sizes == rows else self._emit("aten.reshape.default", value, rows, origin)

    def padding(
        self, names: Sequence[str], rows: Mapping[str, Sequence[Place]], shape: Sequence[int], origin: OpOrigin
    ) -> ValueRef | None:
        """All conditions on keys as one."""
        joined: ValueRef | None = None
        for name in names:
            value = name.removeprefix("~")
            part = self.row(value, rows[value], shape, origin)
            if name.startswith("~"):
                part = self._emit("aten.logical_not.default", part.name, None, origin)
            joined = part if joined is None else self._both(joined, part, origin)
        return joined

    def by_key(self, padding: ValueRef, origin: OpOrigin) -> ValueRef:
        """A row as a mask that broadcasts over heads and queries."""
        batch, keys = self.builder.infos[padding.name].shape
        return self._emit("aten.reshape.default", padding.name, (batch, 1, 1, keys), origin)

    def _both(self, first: ValueRef, other: ValueRef, origin: OpOrigin) -> ValueRef:
        rows, keys = (
            max(sizes) for sizes in zip(*(self.builder.infos[ref.name].shape for ref in (first, other)), strict=True)
        )
        arguments = {"self": first, "other": other}
        return self._append("aten.logical_and.default", arguments, ValueInfo((rows, keys), "bool"), origin)

    def _emit(self, target: str, value: str, shape: tuple[int, ...] | None, origin: OpOrigin) -> ValueRef:
        info = self.builder.infos[value]
        arguments = {"self": ValueRef(value), **({} if shape is None else {"shape": shape})}
        return self._append(target, arguments, ValueInfo(shape or info.shape, info.dtype), origin)

    def _append(self, target: str, arguments: Mapping[str, object], info: ValueInfo, origin: OpOrigin) -> ValueRef:
        key = (target, tuple(arguments.items()))
        if key not in self.known:
            self.known[key] = self.builder.value(info)
            self.steps.append(DraftOp(target, dict(arguments), [self.known[key]], origin, base_name(target)))
        return ValueRef(self.known[key])


def _is_batched(place: Place, sizes: Sequence[int], shape: Sequence[int]) -> bool:
    """Whether a value is read at the sample, and not alike for all of them; NotStructured for any other place."""
    lengths = {index(dim): shape[dim] for dim in (len(shape) - 2, len(shape) - 1)}  # by query, by key
    *lead, (position, length) = zip(place, sizes, strict=True)
    own = [(number, size) for number, size in lead if size != 1 or number != Affine(0)]
    if lengths.get(position) != length or own not in ([], [(index(0), shape[0])]):
        raise _no_rows(sizes)
    return bool(own)


def _no_rows(sizes: Sequence[int]) -> NotStructured:
    return NotStructured(f"its data {list(sizes)} is not one row for each sample")

"""The canonical form of each traced call: where aten has several spellings, a graph has one.

`write` is how all traced calls get into the graph builder. An op's definition has its canonical form
(`OpSpec.canonical`); each returns the names of the outputs. Identities return their input, so nothing is left of a cast
to the same dtype, a dropout that does nothing, a clone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import CaptureError
from ...ops import spec_of
from ..failure import unsupported
from .graph_builder import GraphBuilder, OpOrigin, ValueInfo, ValueRef
from .strided_access import element_numbers


@dataclass(frozen=True, slots=True)
class AtenCall:
    """A traced call on its way into the graph: what a canonical form may look at and do (`TracedCall`)."""

    builder: GraphBuilder
    target: str
    arguments: dict[str, Any]
    infos: Sequence[ValueInfo]
    place: OpOrigin

    @property
    def info(self) -> ValueInfo:
        return self.infos[0]

    @property
    def first(self) -> ValueRef:
        """The tensor that the call is about."""
        for name in ("self", "input"):
            if isinstance(self.arguments.get(name), ValueRef):
                return self.arguments[name]  # type: ignore[no-any-return]
        raise KeyError(f"{self.target} has no self")

    @property
    def input_info(self) -> ValueInfo:
        return self.info_of(self.first)

    def is_value(self, argument: Any) -> bool:
        return isinstance(argument, ValueRef)

    def info_of(self, ref: ValueRef) -> ValueInfo:
        return self.builder.infos[ref.name]

    def describe(self, shape: Sequence[int], dtype: str) -> ValueInfo:
        return ValueInfo(tuple(shape), dtype)

    def reference(self, name: str) -> ValueRef:
        return ValueRef(name)

    def identity(self, ref: ValueRef) -> list[str]:
        return [ref.name]

    def is_loose(self, ref: ValueRef) -> bool:
        return ref.name in self.builder.loose

    def loosen(self, ref: ValueRef) -> None:
        self.builder.loose.add(ref.name)

    def emit(self, target: str | None = None, kind: str | None = None, /, **arguments: Any) -> list[str]:
        return self.builder.emit(target or self.target, arguments, self.infos, self.place, kind)

    def emit_one(self, target: str, arguments: dict[str, Any], info: Any, kind: str | None = None) -> ValueRef:
        return ValueRef(self.builder.emit_one(target, arguments, info, self.place, kind))

    def emit_with(self, target: str, arguments: dict[str, Any], infos: Sequence[Any]) -> list[str]:
        return self.builder.emit(target, arguments, infos, self.place)

    def keep(self) -> list[str]:
        return self.emit(**self.arguments)

    def write(self, target: str, arguments: dict[str, Any], infos: Sequence[Any]) -> list[str]:
        return write(AtenCall(self.builder, target, arguments, infos, self.place))

    def element_numbers(self, size: Sequence[int], strides: Sequence[int], offset: int) -> ValueRef:
        return element_numbers(self.builder, size, strides, offset, self.place)

    def unsupported(self, what: str, remedy: str) -> CaptureError:
        return unsupported(what, self.place.source, remedy)


def write(call: AtenCall) -> list[str]:
    """Put a traced call into the draft, in its canonical form."""
    rewriting = spec_of(call.target).rewriting(call.target.rpartition(".")[2])
    return rewriting(call) if rewriting else call.keep()

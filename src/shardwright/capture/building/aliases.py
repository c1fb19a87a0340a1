"""In-place writes made functional.

An exported graph still writes in place (`x[:, 1:] = y`, `buffer.add_(1)`). Each exported
tensor is a `TensorHandle`: a root, or a view of another handle. A write to a view becomes a new
value of its root, and other views of that root are taken again when they are next read.

    w = zeros;  v = w[1:];  v.copy_(y);  w.sum()
    w0 = zeros; v0 = w0[1:]; w1 = slice_scatter(w0, y, 1:);  w1.sum()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...ops import spec_of
from ..failure import unsupported
from .graph_builder import GraphBuilder, OpOrigin, ValueRef
from .strided_access import element_numbers


@dataclass(slots=True)
class AliasView:
    """How a handle is taken from its parent: the call, and which of its outputs."""

    take: Callable[[str], list[str]]
    target: str
    arguments: dict[str, Any]
    index: int = 0


@dataclass(slots=True)
class TensorHandle:
    name: str
    parent: TensorHandle | None = None
    view: AliasView | None = None
    version: int = 0
    seen: int = 0
    storage: int = 0  # of the traced tensor: whether a reshape shared memory
    past: list[str] = field(default_factory=list)  # the values that a root had before it was written to

    def root(self) -> TensorHandle:
        return self if self.parent is None else self.parent.root()

    def read(self) -> str:
        """The value that this tensor has now."""
        if self.parent is None or self.view is None:
            return self.name
        now = self.root().version
        if self.seen != now:
            self.name = self.view.take(self.parent.read())[self.view.index]
            self.seen = now
        return self.name

    def write(self, builder: GraphBuilder, name: str, place: OpOrigin) -> None:
        """Give this tensor, and everything that shares its memory, a new value."""
        if place.no_grad:
            name = _unnoticed(builder, self.read(), name, place)
        if self.parent is None or self.view is None:
            self.version += 1
            self.past.append(self.name)
        else:
            before = self.parent.read()
            new = _scatter(builder, self.view, before, name, place)
            if spec_of(self.view.target).gradient == "none":
                new = _unnoticed(builder, before, new, place)
            self.parent.write(builder, new, place)
            self.seen = self.root().version
        self.name = name


def _unnoticed(builder: GraphBuilder, old: str, new: str, place: OpOrigin) -> str:
    """A write under no_grad, or through detach, as autograd sees it: new values, with the gradient of the old ones."""
    if not builder.infos[old].gradient or builder.infos[new].gradient:
        return new
    place = replace(place, no_grad=False)
    info = builder.infos[old]
    detached = builder.emit_one("aten.detach.default", {"self": ValueRef(old)}, info, place)
    nothing = builder.emit_one("aten.sub.Tensor", {"self": ValueRef(old), "other": ValueRef(detached)}, info, place)
    return builder.emit_one("aten.add.Tensor", {"self": ValueRef(new), "other": ValueRef(nothing)}, info, place)


@dataclass(frozen=True, slots=True)
class WriteThrough:
    """A write through a view (`ViewWrite`): what the view shows of its parent is replaced."""

    builder: GraphBuilder
    view: AliasView
    parent_name: str
    as_it_is: str
    place: OpOrigin

    @property
    def target(self) -> str:
        return self.view.target

    @property
    def options(self) -> dict[str, Any]:
        return {name: value for name, value in self.view.arguments.items() if name not in ("self", "input")}

    @property
    def index(self) -> int:
        return self.view.index

    @property
    def parent(self) -> ValueRef:
        return ValueRef(self.parent_name)

    @property
    def new(self) -> ValueRef:
        return ValueRef(self.as_it_is)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.builder.infos[self.parent_name].shape

    @property
    def new_shape(self) -> tuple[int, ...]:
        return self.builder.infos[self.as_it_is].shape

    def emit(self, target: str, /, **arguments: Any) -> str:
        return self.builder.emit_one(target, arguments, self.builder.infos[self.parent_name], self.place)

    def element_numbers(self, size: Sequence[int], strides: Sequence[int], offset: int) -> ValueRef:
        return element_numbers(self.builder, size, strides, offset, self.place)


def _scatter(builder: GraphBuilder, view: AliasView, parent: str, new: str, place: OpOrigin) -> str:
    """The parent with the part that `view` takes from it replaced by `new`."""
    write_back = spec_of(view.target).write_back
    if write_back is None:
        raise unsupported(
            f"it writes in place through a view made by {view.target}",
            place.source,
            "Write out of place instead (x = x.index_put(...), torch.where, torch.cat).",
        )
    return write_back(WriteThrough(builder, view, parent, new, place))

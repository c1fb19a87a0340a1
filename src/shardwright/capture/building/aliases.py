"""In-place writes made functional.

An exported graph still writes in place (`x[:, 1:] = y`, `buffer.add_(1)`). Each exported
tensor is a `TensorHandle`: a root, or a view of another handle. A write to a view becomes a new
value of its root, and other views of that root are taken again when they are next read.

    w = zeros;  v = w[1:];  v.copy_(y);  w.sum()
    w0 = zeros; v0 = w0[1:]; w1 = slice_scatter(w0, y, 1:);  w1.sum()
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ..failure import unsupported
from .canonical import slice_bounds
from .graph_builder import GraphBuilder, OpOrigin, ValueRef
from .strided_access import element_numbers

SHAPERS = {
    "aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten", "aten.squeeze",
    "aten.unsqueeze", "aten.view_as", "aten.reshape_as", "aten.alias", "aten.detach", "aten.detach_",
    "aten.to", "aten.contiguous", "aten.type_as",
}  # fmt: skip
SELF_INVERSE = {"aten.transpose", "aten.t", "aten.swapaxes", "aten.swapdims", "aten.numpy_T", "aten.mT"}


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
    storage: int = 0  # of the traced tensor: tells whether a reshape shared memory
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
            if self.view.target.startswith("aten.detach"):
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


def _scatter(builder: GraphBuilder, view: AliasView, parent: str, new: str, place: OpOrigin) -> str:
    """The parent with the part that `view` takes from it replaced by `new`."""
    info = builder.infos[parent]
    kind = view.target.rsplit(".", 1)[0]
    options = {name: value for name, value in view.arguments.items() if name not in ("self", "input")}
    both = {"self": ValueRef(parent), "src": ValueRef(new)}
    if kind in SHAPERS:
        if builder.infos[new].shape == info.shape:
            return new
        return builder.emit_one("aten.reshape.default", {"self": ValueRef(new), "shape": info.shape}, info, place)
    if kind in SELF_INVERSE:
        return builder.emit_one(view.target, {"self": ValueRef(new), **options}, info, place)
    if kind == "aten.permute":
        dims = [dim % len(info.shape) for dim in options["dims"]]
        inverse = tuple(dims.index(dim) for dim in range(len(dims)))
        return builder.emit_one("aten.permute.default", {"self": ValueRef(new), "dims": inverse}, info, place)
    if kind == "aten.as_strided":
        numbers = element_numbers(
            builder, options["size"], options["stride"], options.get("storage_offset") or 0, place
        )
        written = {"self": ValueRef(parent), "index": numbers, "source": ValueRef(new)}
        return builder.emit_one("aten.put.default", written, info, place)
    if kind in ("aten.slice", "aten.select", "aten.diagonal"):
        if kind == "aten.slice":
            options = slice_bounds(options, info.shape)
        return builder.emit_one(f"{kind}_scatter.default", {**both, **options}, info, place)
    if kind == "aten.unbind":
        where = {"dim": options.get("dim", 0), "index": view.index}
        return builder.emit_one("aten.select_scatter.default", {**both, **where}, info, place)
    if kind in ("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.narrow"):
        span = _span(builder, view, options, parent, new)
        return builder.emit_one("aten.slice_scatter.default", {**both, **span}, info, place)
    raise unsupported(
        f"it writes in place through a view made by {view.target}",
        place.source,
        "Write out of place instead (x = x.index_put(...), torch.where, torch.cat).",
    )


def _span(builder: GraphBuilder, view: AliasView, options: dict[str, Any], parent: str, new: str) -> dict[str, int]:
    """Which slice of its parent an output of split, or a narrow, is."""
    dim = options.get("dim", 0)
    length = builder.infos[new].shape[dim]
    if "start" in options:
        start = options["start"]
    elif view.target.startswith("aten.chunk"):
        start = -(-builder.infos[parent].shape[dim] // options["chunks"]) * view.index
    else:
        sizes: Any = options.get("split_sizes", options.get("split_size"))
        start = sizes * view.index if isinstance(sizes, int) else sum(sizes[: view.index])
    return {"dim": dim, "start": start, "end": start + length}

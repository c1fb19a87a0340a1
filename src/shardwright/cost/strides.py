"""Which values of a graph share memory, and how they lie in it.

A view has no memory of its own, and what keeps it keeps all that it is a view of. Whether a
reshape is a view or a copy depends on strides, which a graph does not have: here they are
worked out as torch would, at global shape. A share of a value is cut out of the same order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field

from ..ir import Graph, Op
from ..rules.pointwise import BINARY, LINEAR_UNARY, UNARY

Sizes = tuple[int, ...]

RESHAPES = frozenset("view reshape _unsafe_view flatten unflatten view_as reshape_as".split())
VIEWS = RESHAPES | frozenset(
    "unsqueeze squeeze transpose t permute movedim swapaxes expand expand_as broadcast_to slice select split "
    "split_with_sizes chunk unbind narrow diagonal unfold detach alias lift_fresh contiguous".split()
)
ELEMENTWISE = frozenset(
    name.split(".")[0] for name in f"{UNARY} {BINARY} {LINEAR_UNARY} add sub rsub mul div where _to_copy to".split()
) | frozenset("dropout clone scaled_dot_product_attention".split())
"""Ops whose result lies in memory in the order of what they read."""


def op_kind(target: str) -> str:
    """The name of an op without its room and overload: "linear" for "aten.linear.default"."""
    room, _, rest = target.partition(".")
    return rest.partition(".")[0] if room == "aten" else target


@dataclass(frozen=True, slots=True)
class Strides:
    """The strides of every value, and the ops whose results are views on their first input."""

    of: dict[str, Sizes]
    views: frozenset[str]
    _flat: dict[str, bool] = field(default_factory=dict, repr=False)

    def flat(self, value: str, shape: Sizes) -> bool:
        """Whether all dims but the last can be seen as one without a copy."""
        if value not in self._flat:
            after = (math.prod(shape[:-1]), *shape[-1:])
            self._flat[value] = len(shape) < 3 or viewed(shape, self.of[value], after) is not None
        return self._flat[value]


def is_view(op: Op, strides: Strides) -> bool:
    """Whether the results of an op are views on its first input."""
    return op.name in strides.views


_KNOWN: dict[int, Strides] = {}  # by the identity of a graph that is alive


def strides_of(graph: Graph) -> Strides:
    """The strides of every value of a graph, from contiguous inputs on. Worked out once."""
    if id(graph) not in _KNOWN:
        _KNOWN[id(graph)] = _worked_out(graph)
        weakref.finalize(graph, _KNOWN.pop, id(graph), None)
    return _KNOWN[id(graph)]


def _worked_out(graph: Graph) -> Strides:
    strides: dict[str, Sizes] = {}
    views: set[str] = set()
    produced = {name for op in graph.ops for name in op.outputs}
    for name, value in graph.values.items():
        if name not in produced:
            strides[name] = contiguous(value.shape)
    for op in graph.ops:
        kind = op_kind(op.target)
        if kind in VIEWS and op.inputs:
            shape, stride = graph.values[op.inputs[0]].shape, strides[op.inputs[0]]
            results = [_view(kind, op, shape, stride, graph.values[name].shape) for name in op.outputs]
            if None not in results:
                views.add(op.name)
        elif kind in ELEMENTWISE:
            results = [_like(graph, op, strides, graph.values[name].shape) for name in op.outputs]
        else:
            results = [None for _ in op.outputs]
        for name, result in zip(op.outputs, results, strict=True):
            strides[name] = contiguous(graph.values[name].shape) if result is None else result
    return Strides(strides, frozenset(views))


def contiguous(shape: Sequence[int]) -> Sizes:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _like(graph: Graph, op: Op, known: dict[str, Sizes], shape: Sizes) -> Sizes | None:
    """Dense, in the order of the first input that has the shape of the result."""
    for name in op.inputs:
        strides = known[name]
        if graph.values[name].shape == shape and 0 not in strides:
            order = sorted(range(len(shape)), key=lambda dim: (-strides[dim], dim))
            result, step = [0] * len(shape), 1
            for dim in reversed(order):
                result[dim] = step
                step *= max(shape[dim], 1)
            return tuple(result)
    return None


def _view(kind: str, op: Op, shape: Sizes, strides: Sizes, after: Sizes) -> Sizes | None:
    """The strides of a view; None for what has to copy."""
    rank = max(len(shape), 1)
    if kind in RESHAPES:
        return viewed(shape, strides, after)
    if kind == "contiguous":
        return strides if strides == contiguous(shape) else None
    if kind in ("transpose", "swapaxes", "t") and len(shape) > 1:
        first, second = (0, 1) if kind == "t" else (op.argument("dim0", 0) % rank, op.argument("dim1", 1) % rank)
        swapped = list(strides)
        swapped[first], swapped[second] = swapped[second], swapped[first]
        return tuple(swapped)
    if kind == "permute":
        return tuple(strides[dim % rank] for dim in op.argument("dims"))
    if kind == "unsqueeze":
        at = op.argument("dim") % (len(shape) + 1)
        inner = strides[at] * shape[at] if at < len(shape) else 1
        return (*strides[:at], inner, *strides[at:])
    if kind == "squeeze":
        remaining = [at for at, size in enumerate(shape) if size != 1]
        return tuple(strides[at] for at in remaining) if len(remaining) == len(after) else contiguous(after)
    if kind in ("expand", "expand_as", "broadcast_to"):
        lead = len(after) - len(shape)
        return tuple(
            0 if at < lead or shape[at - lead] != size else strides[at - lead] for at, size in enumerate(after)
        )
    if kind in ("select", "unbind"):
        at = op.argument("dim", 0) % rank
        return (*strides[:at], *strides[at + 1 :])
    if kind == "slice":
        at = op.argument("dim", 0) % rank
        return (*strides[:at], strides[at] * (op.argument("step", 1) or 1), *strides[at + 1 :])
    return strides if len(strides) == len(after) else contiguous(after)


def viewed(shape: Sizes, strides: Sizes, after: Sizes) -> Sizes | None:
    """The strides of a tensor seen in another shape, if that needs no copy (torch's `computeStride`)."""
    if 0 in shape:
        return contiguous(after)
    result = [0] * len(after)
    at = len(after) - 1
    base, count, run = (strides[-1] if strides else 1), 1, 1
    for dim in range(len(shape) - 1, -1, -1):
        count *= shape[dim]
        if dim == 0 or (shape[dim - 1] != 1 and strides[dim - 1] != count * base):
            while at >= 0 and (run < count or after[at] == 1):
                result[at] = run * base
                run *= after[at]
                at -= 1
            if run != count:
                return None
            if dim > 0:
                base, count, run = strides[dim - 1], 1, 1
    if not shape:
        return contiguous(after)
    return tuple(result) if at == -1 else None

"""Which values of a graph share memory, and how they lie in it.

A view has no memory of its own, and what keeps it keeps all that it is a view of. Whether a
reshape is a view or a copy depends on strides, which a graph does not have: here they are
worked out as torch would, at global shape. A share of a value is cut out of the same order.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field

from ..ir import Graph, Op, Value
from ..ops import spec_of
from ..ops.strides import contiguous, viewed

Sizes = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Strides:
    """The strides of every value, and the ops whose results are views on their first input."""

    of: dict[str, Sizes]
    views: frozenset[str]
    _flat: dict[str, tuple[bool, ...]] = field(default_factory=dict, repr=False)  # by op

    def flat_inputs(self, op: Op, values: Mapping[str, Value]) -> tuple[bool, ...]:
        """Whether all dims but the last of each input can be seen as one without a copy."""
        if op.name not in self._flat:
            self._flat[op.name] = tuple(self._is_flat(name, values[name].shape) for name in op.inputs)
        return self._flat[op.name]

    def _is_flat(self, value: str, shape: Sizes) -> bool:
        after = (math.prod(shape[:-1]), *shape[-1:])
        return len(shape) < 3 or viewed(shape, self.of[value], after) is not None


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
        spec = spec_of(op.target)
        if spec.view is not None and op.inputs:
            shape, stride = graph.values[op.inputs[0]].shape, strides[op.inputs[0]]
            results = [spec.view(op, shape, stride, graph.values[name].shape) for name in op.outputs]
            if None not in results:
                views.add(op.name)
        elif spec.keeps_order:
            results = [_like(graph, op, strides, graph.values[name].shape) for name in op.outputs]
        else:
            results = [None for _ in op.outputs]
        for name, result in zip(op.outputs, results, strict=True):
            strides[name] = contiguous(graph.values[name].shape) if result is None else result
    return Strides(strides, frozenset(views))


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

"""Where elements lie in memory: the strides of a view, from those of what it is a view of.

A view is a function of the op, the shape and strides of its input, and the shape of its result. None says that it has
to copy.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ir import Op
from .spec import Strides


def contiguous(shape: Sequence[int]) -> Strides:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def viewed(shape: Strides, strides: Strides, after: Strides) -> Strides | None:
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


def reshaped(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    return viewed(shape, strides, after)


def as_it_is(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    """Of parts, and of what nobody has defined otherwise."""
    return strides if len(strides) == len(after) else contiguous(after)


def if_contiguous(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    return strides if strides == contiguous(shape) else None


def swapped(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    if len(shape) < 2:
        return as_it_is(op, shape, strides, after)
    first, second = (op.argument(name, default) % len(shape) for name, default in (("dim0", 0), ("dim1", 1)))
    result = list(strides)
    result[first], result[second] = result[second], result[first]
    return tuple(result)


def permuted(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    return tuple(strides[dim % max(len(shape), 1)] for dim in op.argument("dims"))


def unsqueezed(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    at = op.argument("dim") % (len(shape) + 1)
    inner = strides[at] * shape[at] if at < len(shape) else 1
    return (*strides[:at], inner, *strides[at:])


def squeezed(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    remaining = [at for at, size in enumerate(shape) if size != 1]
    return tuple(strides[at] for at in remaining) if len(remaining) == len(after) else contiguous(after)


def expanded(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    lead = len(after) - len(shape)
    return tuple(0 if at < lead or shape[at - lead] != size else strides[at - lead] for at, size in enumerate(after))


def selected(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    at = op.argument("dim", 0) % max(len(shape), 1)
    return (*strides[:at], *strides[at + 1 :])


def sliced(op: Op, shape: Strides, strides: Strides, after: Strides) -> Strides | None:
    at = op.argument("dim", 0) % max(len(shape), 1)
    return (*strides[:at], strides[at] * (op.argument("step", 1) or 1), *strides[at + 1 :])

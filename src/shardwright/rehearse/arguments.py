"""The arguments of an op at other sizes: integers that are sizes follow the shapes.

The ops that take sizes are listed here. Other integers stay as they are (dims, strides, the ignored index). Calling
the op shows whether it runs so, with the right result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..ir import Op

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Resized:
    """An op, with the shapes of its inputs and outputs before and after."""

    op: Op
    inputs: Sequence[Shape]
    outputs: Sequence[Shape]
    small_inputs: Sequence[Shape]
    small_outputs: Sequence[Shape]

    @property
    def dim(self) -> int:
        """The dim that the op works along."""
        rank = len(self.inputs[0])
        dim = self.op.argument("dim", 0)
        return int(dim) % rank if rank else 0


def resize_arguments(call: Resized) -> Op:
    """The op with the sizes among its arguments mapped."""
    kind = call.op.target.split(".")[1]
    change = _CHANGES.get(kind)
    changes = change(call) if change is not None else _shapes(call)
    known = {name for name, _ in call.op.arguments}
    return call.op.with_arguments(**{name: value for name, value in changes.items() if name in known})


SIZES = ("size", "shape", "sizes", "output_size", "size_")
"""Arguments that are the shape of the output, or its trailing dims."""


def _shapes(call: Resized) -> dict[str, Any]:
    """Arguments that are a shape: -1 stays, and so does what is not the output's shape."""
    shapes: dict[str, Any] = {}
    for name, value in call.op.arguments:
        if name not in SIZES or not isinstance(value, tuple) or not call.outputs:
            continue
        real, small = call.outputs[0], call.small_outputs[0]
        if len(value) <= len(real) and all(type(size) is int for size in value):
            ends = zip(value, real[len(real) - len(value) :], small[len(small) - len(value) :], strict=True)
            shapes[name] = tuple(new if size == old else size for size, old, new in ends)
    return shapes


def _arange(call: Resized) -> dict[str, Any]:
    start, step = call.op.argument("start", 0), call.op.argument("step", 1)
    if not all(type(number) is int for number in (start, step)):
        return {}
    return {"end": start + step * call.small_outputs[0][0]}


def _linspace(call: Resized) -> dict[str, Any]:
    return {"steps": call.small_outputs[0][0]}


def _slice(call: Resized) -> dict[str, Any]:
    return _part(call, call.outputs[0], call.small_outputs[0])


def _slice_scatter(call: Resized) -> dict[str, Any]:
    return _part(call, call.inputs[1], call.small_inputs[1])


def _part(call: Resized, part: Shape, small_part: Shape) -> dict[str, Any]:
    """A slice from the start or to the end stays one; another begins where it fits."""
    before, after = call.inputs[0][call.dim], part[call.dim]
    room, length = call.small_inputs[0][call.dim], small_part[call.dim]
    step = call.op.argument("step", 1) or 1
    if before == after and step == 1:
        return {"start": 0, "end": room}
    start = call.op.argument("start", 0) or 0
    start = max(start + before, 0) if start < 0 else start
    span = (length - 1) * step + 1
    if step == 1 and start + after == before and start:
        begin = room - length
    elif step == 1 and after and start % after == 0 and before % after == 0:  # one of several equal parts
        begin = start // after * length
    else:
        begin = min(start, max(room - span, 0))
    return {"start": begin, "end": min(begin + length * step, room)}


def _narrow(call: Resized) -> dict[str, Any]:
    room, length = call.small_inputs[0][call.dim], call.small_outputs[0][call.dim]
    return {"start": min(call.op.argument("start", 0), room - length), "length": length}


def _select(call: Resized) -> dict[str, Any]:
    before, room = call.inputs[0][call.dim], call.small_inputs[0][call.dim]
    index = call.op.argument("index", 0)
    return {"index": room - 1 if index == before - 1 else index if -room <= index < room else room // 2}


def _split(call: Resized) -> dict[str, Any]:
    lengths = tuple(shape[call.dim] for shape in call.small_outputs)
    return {"split_size": lengths[0], "split_sizes": lengths}


def _norm(call: Resized) -> dict[str, Any]:
    count = len(call.op.argument("normalized_shape", ()))
    return {"normalized_shape": call.small_inputs[0][len(call.small_inputs[0]) - count :]}


def _repeat(call: Resized) -> dict[str, Any]:
    out = call.small_outputs[0]
    shape = (1,) * (len(out) - len(call.small_inputs[0])) + tuple(call.small_inputs[0])
    ratios = tuple(many // few for many, few in zip(out, shape, strict=True))
    return {"repeats": ratios, "dims": ratios}


def _repeat_interleave(call: Resized) -> dict[str, Any]:
    return {"repeats": call.small_outputs[0][call.dim] // call.small_inputs[0][call.dim]}


def _along(name: str) -> Callable[[Resized], dict[str, Any]]:
    """A number that is the size of the output along the op's dim."""

    def change(call: Resized) -> dict[str, Any]:
        rank = len(call.small_outputs[0])
        return {name: call.small_outputs[0][call.op.argument("dim", -1) % rank]} if rank else {}

    return change


def _one_hot(call: Resized) -> dict[str, Any]:
    return {"num_classes": call.small_outputs[0][-1]}


def _embedding(call: Resized) -> dict[str, Any]:
    index = call.op.argument("padding_idx", -1)
    rows = call.small_inputs[0][0]
    return {"padding_idx": index if index < rows else rows - 1}


def _unflatten(call: Resized) -> dict[str, Any]:
    count = len(call.op.argument("sizes", ()))
    return {"sizes": call.small_outputs[0][call.dim : call.dim + count]}


def _convolution(call: Resized) -> dict[str, Any]:
    if call.op.argument("groups", 1) == 1 or "transpose" in call.op.target or call.op.argument("transposed", False):
        return {}
    channels = call.small_inputs[0][1 if len(call.inputs[0]) == len(call.inputs[1]) else 0]
    return {"groups": max(1, channels // call.small_inputs[1][1])}


def _eye(call: Resized) -> dict[str, Any]:
    rows, columns = call.small_outputs[0]
    return {"n": rows, "m": columns}


def _attention(call: Resized) -> dict[str, Any]:
    """A window stays one: it reaches as far into the small sequence as into the real one, at least by a key."""
    before, after, prefix = (call.op.argument(name) for name in ("before", "after", "prefix"))
    real, small = call.inputs[1][-2], call.small_inputs[1][-2]

    def resized(reach: int | None) -> int | None:
        return (
            reach if reach is None or abs(reach) <= 1 else (1 if reach > 0 else -1) * max(1, abs(reach) * small // real)
        )

    return {"before": resized(before), "after": resized(after), "prefix": resized(prefix)}


_CHANGES: dict[str, Callable[[Resized], dict[str, Any]]] = {
    "arange": _arange, "linspace": _linspace, "slice": _slice, "slice_scatter": _slice_scatter,
    "narrow": _narrow, "select": _select, "split": _split,
    "split_with_sizes": _split, "layer_norm": _norm, "rms_norm": _norm, "native_layer_norm": _norm,
    "repeat": _repeat, "tile": _repeat, "repeat_interleave": _repeat_interleave, "topk": _along("k"),
    "one_hot": _one_hot, "embedding": _embedding, "unflatten": _unflatten, "conv1d": _convolution,
    "conv2d": _convolution, "conv3d": _convolution, "convolution": _convolution, "eye": _eye,
    "attention": _attention,
}  # fmt: skip

"""How long an op takes on a device, forward and backward, as eager PyTorch runs it: a kernel or a few for each op.

    product      flops / (peak x what a product of this size and shape reaches), or its bytes if they take longer;
                 backward one such product for each input that has a gradient
    attention    the same with the efficiency of fused attention, as its kernel has it for short sequences, masks and
                 backward (`AttentionPrice`), which is 5 products where forward has 2
    the rest     bytes / (bandwidth x what kernels reach), bytes being passes over inputs and outputs (`OpSpec.passes`)
    views        nothing, except for what their backward must write

Starting a kernel is in the efficiency curves of the device. What is sent is not here: see `sends.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from ..cluster import Device, Kind
from ..ir import MaskStructure
from ..ops import Kernel, spec_of
from ..ops.attention import STRUCTURED
from ..ops.contexts import LocalCall, LocalTensor
from ..ops.user_calls import OPAQUE


class OpTime(NamedTuple):
    """Seconds of the two passes."""

    forward: float
    backward: float


FREE = OpTime(0.0, 0.0)


LARGE = 1e9
"""The side of a product that nothing is known of."""


def op_time(call: LocalCall, device: Device) -> OpTime:
    """Seconds that a device needs for a call, forward and backward (0 if there is none)."""
    kernel = spec_of(call.op.target).kernel
    if kernel is None and _casts_by_itself(call) and _does_much(call):
        kernel = Kernel.MATMUL
    return _TIMES.get(kernel, _pointwise)(call, device)


def join_time(bytes: float, uses: int, device: Device) -> float:
    """Backward: a value of so many bytes that is used several times gets the sum of its gradients, one by one."""
    return max(0, uses - 1) * device.op_time(0.0, 3.0 * bytes, "pointwise", "")


def _casts_by_itself(call: LocalCall) -> bool:
    """A custom op, experts or an opaque submodule: casts of autocast are inside of it, not in the graph."""
    return not call.op.target.startswith("aten.")


def _does_much(call: LocalCall) -> bool:
    """A custom op, experts or an opaque submodule that has more arithmetic than elements."""
    return call.flops > 2 * sum(tensor.elements for tensor in call.outputs)


def _bytes(call: LocalCall) -> float:
    if call.moved is not None:
        return call.moved
    return sum(tensor.bytes for tensor in call.inputs) + sum(tensor.bytes for tensor in call.outputs)


def _moved(bytes: float, device: Device, kernels: int = 1, kind: Kind = "pointwise") -> float:
    """Seconds to go over so many bytes in so many kernels."""
    return kernels * device.op_time(0.0, bytes / kernels, kind, "") if bytes > 0 else 0.0


# -- products


def _product(call: LocalCall, device: Device) -> OpTime:
    kind: Kind = "convolution" if spec_of(call.op.target).kernel is Kernel.CONVOLUTION else "matmul"
    forward = _product_time(call, device, kind, call.flops / device.side_part(_smallest_side(call)))
    if not call.gradient:
        return OpTime(forward, 0.0)
    wanted = sum(tensor.gradient for tensor in _operands(call)) if call.op.target != OPAQUE else 2
    return OpTime(forward, wanted * forward)


def _operands(call: LocalCall) -> tuple[LocalTensor, ...]:
    """What is multiplied: not what is added to it."""
    operands = spec_of(call.op.target).operands
    return call.inputs if operands is None else tuple(call.inputs[at] for at in operands if at < len(call.inputs))


def _product_time(call: LocalCall, device: Device, kind: Kind, flops: float) -> float:
    dtype = units(device, multiplied_in(call))
    casts = CAST_BYTES * sum(tensor.elements for tensor in _operands(call)) if dtype == "float8" else 0.0
    return device.op_time(flops, _bytes(call), kind, dtype) + _moved(casts, device)


CAST_BYTES = 2 + 2 + 1
"""For an element that is multiplied in float8: it is read for the largest one, read again, and written."""


def multiplied_in(call: LocalCall) -> str:
    """The dtype of a product: float8 if asked for, that of autocast where a part casts by itself, else its inputs'."""
    if call.multiplies_in is not None:
        return call.multiplies_in
    if call.op.autocast is not None and _casts_by_itself(call):
        return call.op.autocast.rpartition(":")[2]
    return next((tensor.dtype for tensor in call.inputs if tensor.floating), "float32")


def units(device: Device, dtype: str) -> str:
    """The dtype whose arithmetic a device uses for a dtype: its own, or one that the device has flops for."""
    known = device.known_dtypes
    if dtype in known:
        return dtype
    if dtype.startswith("float8"):
        return next(name for name in ("float8", "bfloat16", "float32", *known) if name in known)
    if dtype in ("complex128",) and "float64" in known:
        return "float64"
    return "float32" if "float32" in known else next(iter(known))


def _smallest_side(call: LocalCall) -> float:
    """Of a product of b matrices m x k and k x n the smallest of m, n and k.

    With A = b m k, B = b k n and C = b m n elements and F = 2 b m n k flops, b = A B C / (F / 2)^2, and the
    sides follow: m = sqrt(A C / (B b)), and so on.
    """
    operands = _operands(call)
    if len(operands) != 2 or not call.outputs or call.flops <= 0:
        return LARGE
    a, b, c = operands[0].elements, operands[1].elements, call.outputs[0].elements
    if not (a and b and c):
        return LARGE
    batch = max(1.0, a * b * c / (call.flops / 2) ** 2)
    return math.sqrt(min(a * b / c, a * c / b, b * c / a) / batch)


def _attention(call: LocalCall, device: Device) -> OpTime:
    """Fused. A causal one skips the blocks above the diagonal, one with a window those before it too."""
    kernel, structured = device.attention, call.op.target == STRUCTURED
    keys = max(1.0, call.flops / (4.0 * max(1.0, call.inputs[0].elements)))
    seen, edges = _seen(call, round(keys)) if structured else (0.5, 1) if call.op.argument("is_causal") else (1.0, 0)
    mask = structured or call.op.tensor("attn_mask") is not None
    work = kernel.forward_work(call.flops, keys, seen=seen, edges=edges, mask=mask)
    forward = _product_time(call, device, "attention", work)
    return OpTime(forward, kernel.backward_part(keys) * forward if call.gradient else 0.0)


def _seen(call: LocalCall, length: int) -> tuple[float, int]:
    """The share of pairs in reach, as if there were as many queries as keys, and how many diagonals bound it."""
    limits = {name: call.op.argument(name) for name in ("before", "after")}
    reach = MaskStructure(**limits, prefix=call.op.argument("prefix", 0))
    return reach.pairs(length, length) / length**2, sum(limit is not None for limit in limits.values())


# -- what goes over memory


def _pointwise(call: LocalCall, device: Device) -> OpTime:
    spec = spec_of(call.op.target)
    if call.moved is not None:
        return OpTime(_moved(call.moved, device), _moved(2 * call.moved, device) if call.gradient else 0.0)
    passes = spec.passes
    written = sum(tensor.bytes for tensor in call.outputs)
    is_bias = call.op.name.endswith("/ bias")  # folded into the product before it
    forward = 0.0 if is_bias else passes.inputs * sum(tensor.bytes for tensor in call.inputs) + passes.outputs * written
    kind: Kind = "function" if spec.kernel is Kernel.FUNCTION else "pointwise"
    first: Kind = "pooling" if spec.kernel is Kernel.POOLING else kind
    if not call.gradient:
        return OpTime(_moved(forward, device, 1, first), 0.0)
    backward = 0.0
    wanted = [tensor for tensor in call.inputs if tensor.gradient]
    for tensor in wanted:
        if tensor.bytes < written and len(call.inputs) > 1 and tensor.elements < call.outputs[0].elements / 2:
            # a stretched input: its gradient at full size, unless it is the result's own, and then the sum
            backward += written * (1.0 if passes.results == 0 else passes.results + passes.gradients + 1.0)
        else:
            backward += passes.results * written + passes.gradients * tensor.bytes
    kernels = max(passes.kernels, len(wanted))
    if passes.kernels > 1 and wanted:  # norms: their passes are given for all their inputs together
        largest = max(tensor.bytes for tensor in wanted)
        backward = passes.results * written + passes.gradients * largest
    return OpTime(_moved(forward, device, 1, first), _moved(backward, device, kernels, kind))


def _view(call: LocalCall, device: Device) -> OpTime:
    """Free. Only a reshape that can't be a view copies, and what was stretched is summed backward."""
    forward = _moved(_bytes(call), device) if call.copies else 0.0
    stretched = call.gradient and call.inputs and call.inputs[0].elements < 0.6 * call.outputs[0].elements
    return OpTime(forward, _moved(_bytes(call), device) if stretched else 0.0)


def _part(call: LocalCall, device: Device) -> OpTime:
    """Parts of a tensor are views. Backward puts their gradients together, a single part among zeros."""
    if not call.gradient or not call.inputs:
        return FREE
    parts = sum(tensor.bytes for tensor in call.outputs)
    full = call.inputs[0].bytes
    zeros = full if len(call.outputs) == 1 and parts < full else 0.0
    return OpTime(0.0, _moved(zeros + 2.0 * parts, device))


def _joined(call: LocalCall, device: Device) -> OpTime:
    """Tensors put together. Backward the parts of the gradient are views."""
    return OpTime(_moved(_bytes(call), device), 0.0)


def _lookup(call: LocalCall, device: Device) -> OpTime:
    """Rows are read where they are wanted. Backward fills the whole table's gradient with zeros and adds rows to it.

    On CUDA the ids are sorted first, so that rows are added in one order.
    """
    read = sum(tensor.bytes for tensor in call.outputs)
    ids = sum(tensor.bytes for tensor in call.inputs if not tensor.floating)
    forward = _moved(2.0 * read + ids, device)
    if not call.gradient:
        return OpTime(forward, 0.0)
    table = max((tensor.bytes for tensor in call.inputs if tensor.gradient), default=0.0)
    return OpTime(forward, _moved(table, device) + _moved(8.0 * ids, device) + _moved(3.0 * read, device))


def _cross_entropy(call: LocalCall, device: Device) -> OpTime:
    """log_softmax, then the loss of each row. Backward fills zeros, puts ones, and then the log_softmax's."""
    scores = call.inputs[0].bytes
    forward = _moved(2.0 * scores, device, 1, "function")
    return OpTime(forward, _moved(4.0 * scores, device, 2, "function") if call.gradient else 0.0)


def _creation(call: LocalCall, device: Device) -> OpTime:
    return OpTime(_moved(sum(tensor.bytes for tensor in call.outputs), device), 0.0)


_TIMES: dict[Kernel | None, Callable[[LocalCall, Device], OpTime]] = {
    Kernel.MATMUL: _product,
    Kernel.CONVOLUTION: _product,
    Kernel.ATTENTION: _attention,
    Kernel.VIEW: _view,
    Kernel.PART: _part,
    Kernel.LOOKUP: _lookup,
    Kernel.JOIN: _joined,
    Kernel.CREATION: _creation,
    Kernel.CROSS_ENTROPY: _cross_entropy,
}
"""All others go over memory."""


# -- the optimizer


class Update(NamedTuple):
    """Passes of an optimizer's step over the bytes of parameters, gradients and all states."""

    parameters: float
    gradients: float
    states: float


FUSED = {"sgd": Update(2, 1, 0), "momentum": Update(2, 1, 2), "adam": Update(2, 1, 2), "adamw": Update(2, 1, 2)}
"""fused=True: everything is read once, and all but the gradients written once."""

FOREACH = {
    "none": Update(0, 0, 0),
    "sgd": Update(2, 1, 0),  # p += g
    "momentum": Update(2, 1, 4),  # m *= a, m += g, p += m (which reads it)
    # p *= c; m = lerp(m, g); v *= b; v += g g; t = sqrt(v); t /= c; t += eps; p += m / t: t counts as a parameter
    "adamw": Update(10, 3, 4),
    "adam": Update(8, 3, 4),
    "rmsprop": Update(8, 3, 5),
    "adagrad": Update(8, 3, 4),
    "lion": Update(8, 2, 3),
}
"""What torch does on CUDA without being asked: the same step of all parameters at once, one op after the other."""


def update_time(
    parameters: float,
    gradients: float,
    states: float,
    device: Device,
    *,
    optimizer: str = "adamw",
    fused: bool = False,
    kernels: int = 1,
) -> float:
    """Seconds of the optimizer's step on a device that holds so many bytes of each, in so many kernels."""
    passes = FUSED.get(optimizer, FOREACH[optimizer]) if fused else FOREACH[optimizer]
    bytes = passes.parameters * parameters + passes.gradients * gradients + passes.states * states
    return _moved(bytes, device, kernels)

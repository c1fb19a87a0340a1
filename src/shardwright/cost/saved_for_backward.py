"""What autograd saves for backward of each op, as its definition says (`OpSpec.saved`, `OpSpec.saved_extra`).

A definition names the inputs that backward reads by their numbers, and the result by "r". A star after a number says
"only if another input has a gradient": a factor is saved for the gradient of the other factors. What an op saves
beside its inputs and outputs (masks, statistics, indices) is a function of its own, in bytes.

It is what the compiled program does on its rank: dropout saves a mask of one byte an element, for instance, where
torch's own on a CPU saves a float. **An op of which nothing is known saves all its floating inputs and its first
output**, which is more than any op does that has no statistics of its own. Ops without a gradient, and those under
no_grad, save nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..ops import spec_of
from ..ops.contexts import LocalCall, SavedForBackward
from ..rules import Signature


def saved_for_backward(call: LocalCall, signature: Signature, flat: Sequence[bool] | None = None) -> SavedForBackward:
    """What is kept of a call. `flat` says of each input whether its leading dims lie in one run (`Strides.flat`)."""
    inputs, outputs = [False] * len(call.inputs), [False] * len(call.outputs)
    if not call.gradient:
        return SavedForBackward(tuple(inputs), tuple(outputs))
    spec = spec_of(call.op.target)
    saved = spec.saved(call, signature, flat) if callable(spec.saved) else spec.saved
    if isinstance(saved, SavedForBackward):
        return saved
    if saved is None:
        inputs = [tensor.floating for tensor in call.inputs]
        outputs[0] = True
    elif saved == "indices":
        inputs = [not tensor.floating for tensor in call.inputs]
    elif saved == "r1":
        outputs[-1] = True
    else:
        for word in saved.split():
            if word == "r":
                outputs[0] = True
            elif int(word[0]) < len(inputs):
                inputs[int(word[0])] = "*" not in word or any(
                    tensor.gradient for at, tensor in enumerate(call.inputs) if at != int(word[0])
                )
    extra = spec.saved_extra(call, signature) if spec.saved_extra is not None else 0.0
    if spec.flattens and flat is not None:  # a product of rows that don't lie in one run copies them
        for at, tensor in enumerate(call.inputs):
            if inputs[at] and not flat[at]:
                inputs[at] = False
                extra += tensor.bytes
    return SavedForBackward(tuple(inputs), tuple(outputs), extra)


def saved_bytes(call: LocalCall, signature: Signature) -> tuple[tuple[bool, ...], tuple[bool, ...], float]:
    """For the planner: which inputs and outputs are saved, and the bytes beside them."""
    saved = saved_for_backward(call, signature)
    return saved.inputs, saved.outputs, saved.extra

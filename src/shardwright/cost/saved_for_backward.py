"""What autograd saves for backward of each op.

One line for each kind of op, in a short notation: the numbers of the inputs that backward
reads, "r" for the result. A star after a number says "only if another input has a gradient":
a factor is saved for the gradient of the other factors. What an op saves beside its inputs
and outputs (masks, statistics, indices) is a function of its own, in bytes.

The table is what the compiled program does on its rank: dropout saves a mask of one byte an
element, for instance, where torch's own on a CPU saves a float. **An op that is not in the
table saves all its floating inputs and its first output**, which is more than any op does
that has no statistics of its own. Ops without a gradient, and those under no_grad, save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..ir.graph import Slot
from ..rules import Signature
from ..rules.user_calls import OPAQUE
from .call import LocalCall
from .strides import VIEWS, op_kind
from .work import is_experts


@dataclass(frozen=True, slots=True)
class SavedForBackward:
    """For each input and output whether backward needs it, and the bytes that are saved beside them."""

    inputs: tuple[bool, ...]
    outputs: tuple[bool, ...]
    extra: float = 0.0


_LINES = {
    "": f"{' '.join(VIEWS)} add sub rsub neg clone _to_copy to type_as cat stack concat hstack vstack sum mean cumsum "
    "pad constant_pad_nd roll flip repeat repeat_interleave tril triu slice_scatter select_scatter diff "
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_bilinear2d im2col col2im pixel_shuffle "
    "pixel_unshuffle diag_embed zeros_like ones_like full_like empty_like nansum floor ceil round sign trunc real imag "
    "positive lift_fresh_copy new_zeros new_ones new_full rot90 tile mT dropout native_dropout",
    "0": "gelu silu log log2 log10 log1p abs absolute sin cos tan asin acos atan sinh cosh square leaky_relu elu celu "
    "selu softplus mish hardswish hardsigmoid hardtanh relu6 clamp clamp_min clamp_max erf erfc erfinv glu threshold "
    "softshrink hardshrink pow var std avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d l1_loss log_sigmoid logit "
    "group_norm native_group_norm instance_norm "
    "_native_batch_norm_legit_functional batch_norm native_batch_norm _native_batch_norm_legit max_pool1d max_pool2d "
    "max_pool3d nan_to_num lgamma digamma xlogy sinc",
    "r": "relu tanh sigmoid exp exp2 expm1 sqrt rsqrt reciprocal softmax _softmax log_softmax _log_softmax",
    "0 1 2": "layer_norm native_layer_norm",
    "0 r": "amax amin norm linalg_vector_norm logsumexp prod cumprod std_mean var_mean logcumsumexp",
    "0* 1*": "mul mm bmm matmul linear einsum dot mv outer addmv",
    "1* 2*": "addmm baddbmm",
    "0 1": "maximum minimum fmax fmin atan2 mse_loss smooth_l1_loss huber_loss binary_cross_entropy nll_loss "
    "nll_loss_nd nll_loss2d binary_cross_entropy_with_logits soft_margin_loss convolution conv1d conv2d conv3d "
    "conv_transpose1d conv_transpose2d conv_transpose3d logaddexp prelu rms_norm _fused_rms_norm",
    "0 ": "where",
    "1": "embedding masked_fill index_select gather cross_entropy_loss kl_div cross_entropy",
    "indices": "index _unsafe_index index_add scatter scatter_add index_put index_copy take_along_dim masked_select",
    "r1": "max min topk sort cummax cummin kthvalue median mode",
}
_TABLE = {name: line.strip() for line, names in _LINES.items() for name in names.split()}


def saved_for_backward(call: LocalCall, signature: Signature, flat: Sequence[bool] | None = None) -> SavedForBackward:
    """What is kept of a call. `flat` says of each input whether its leading dims lie in one run (`Strides.flat`)."""
    nothing = SavedForBackward((False,) * len(call.inputs), (False,) * len(call.outputs))
    kind = op_kind(call.op.target)
    if not call.gradient:
        return nothing
    inputs, outputs = list(nothing.inputs), list(nothing.outputs)
    if kind == "scaled_dot_product_attention":
        return _attention(call, signature, flat or [True] * len(inputs))
    if call.op.target == OPAQUE and is_experts(signature):
        return SavedForBackward((True,) * len(inputs), nothing.outputs, _experts(call, signature))
    line = _line(kind, call, signature)
    if line is None:
        inputs = [tensor.dtype.startswith(("float", "bfloat", "complex")) for tensor in call.inputs]
        outputs[0] = True
    elif line == "indices":
        inputs = [not tensor.dtype.startswith(("float", "bfloat", "complex")) for tensor in call.inputs]
    elif line == "r1":
        outputs[-1] = True
    else:
        for word in line.split():
            if word == "r":
                outputs[0] = True
            elif int(word[0]) < len(inputs):
                inputs[int(word[0])] = "*" not in word or any(
                    tensor.gradient for at, tensor in enumerate(call.inputs) if at != int(word[0])
                )
    extra = _EXTRA[kind](call, signature) if kind in _EXTRA else 0.0
    if kind in ("linear", "matmul") and flat is not None:  # a product of rows that don't lie in one run copies them
        for at, tensor in enumerate(call.inputs):
            if inputs[at] and not flat[at]:
                inputs[at] = False
                extra += tensor.bytes
    return SavedForBackward(tuple(inputs), tuple(outputs), extra)


def saved_bytes(call: LocalCall, signature: Signature) -> tuple[tuple[bool, ...], tuple[bool, ...], float]:
    """For the planner: which inputs and outputs are saved, and the bytes beside them."""
    saved = saved_for_backward(call, signature)
    return saved.inputs, saved.outputs, saved.extra


def _line(kind: str, call: LocalCall, signature: Signature) -> str | None:
    """The line of an op, with the exceptions that its arguments make."""
    op = call.op
    if kind == "div":  # a number divides without being kept
        return "" if len(call.inputs) < 2 else "0 1" if call.inputs[1].gradient else "1"
    if kind == "mul" and len(call.inputs) < 2:
        return ""
    if kind == "pow" and op.target.endswith("Tensor_Tensor"):
        return "0 1 r"
    if kind == "where" and op.target.endswith(("ScalarOther", "ScalarSelf", "self")):
        return "0"
    if kind in ("max", "min") and (len(call.inputs) > 1 or len(call.outputs) < 2):
        return "0 1" if len(call.inputs) > 1 else "0 r"
    if kind == "adaptive_avg_pool2d":
        return "" if tuple(op.argument("output_size")) == (1, 1) else "0"  # of one pixel it is a mean
    if kind == "cross_entropy_loss" and split_classes(call, signature):
        return "0 1"
    if kind == "masked_fill" and isinstance(op.argument("value"), Slot):
        return "1"
    return _TABLE.get(kind)


Extra = Callable[[LocalCall, Signature], float]


def _rows(call: LocalCall, signature: Signature) -> float:
    """How many rows a norm over the last dims has."""
    width = math.prod(call.op.argument("normalized_shape", ()) or (1,))
    return call.inputs[0].elements / max(width, 1)


def _normed(call: LocalCall, signature: Signature) -> float:
    """The inverse deviation of each row, and on a CPU the normed rows themselves, for the weight's gradient."""
    weight = any(tensor.gradient for tensor in call.inputs[1:])
    return 4 * _rows(call, signature) + (call.inputs[0].bytes if weight else 0.0)


def _groups(call: LocalCall, signature: Signature) -> float:
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    return 8.0 * shape[0] * float(call.op.argument("num_groups", call.op.argument("group", 1)))


def split_classes(call: LocalCall, signature: Signature) -> bool:
    """Whether a cross entropy runs on some of the classes: it keeps logits then, and no softmax."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    classes = shape[1] if len(shape) > 1 else shape[0]
    labels = call.inputs[1]
    return not labels.dtype.startswith("float") and call.inputs[0].elements < 0.99 * classes * labels.elements


def _log_softmax(call: LocalCall, signature: Signature) -> float:
    """The logarithm of the softmax; with split classes a few numbers for each row (see `runtime.losses`)."""
    if split_classes(call, signature):
        return call.inputs[1].elements * (8.0 + 8.0 + 2.0)
    return call.inputs[0].bytes + 4


def _channels(call: LocalCall, signature: Signature) -> float:
    return 8.0 * signature.analysis.graph.values[call.op.inputs[0]].shape[1]


_EXTRA: dict[str, Extra] = {
    "layer_norm": lambda call, signature: 8 * _rows(call, signature),
    "native_layer_norm": lambda call, signature: 8 * _rows(call, signature),
    "rms_norm": _normed,
    "group_norm": _groups,
    "native_group_norm": _groups,
    "cross_entropy_loss": _log_softmax,
    "dropout": lambda call, signature: call.outputs[0].elements,
    "native_dropout": lambda call, signature: call.outputs[0].elements,
    "max_pool2d": lambda call, signature: 8 * call.outputs[0].elements,
    "_native_batch_norm_legit_functional": _channels,
    "batch_norm": _channels,
    "log_sigmoid": lambda call, signature: call.outputs[0].bytes,
}


def _attention(call: LocalCall, signature: Signature, flat: Sequence[bool]) -> SavedForBackward:
    """The fused kernel keeps q, k, v, its result and a number for each query; other ways keep the scores.

    The kernel wants a floating mask, and one without a gradient. With dropout the weights are computed as they stand.
    """
    query, key, value = call.inputs[:3]
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    queries = query.elements / max(shape[-1], 1)
    scores = queries * keys * query.item
    mask = call.inputs[3] if len(call.inputs) > 3 else None
    rest = (False,) * (len(call.inputs) - 3)
    if call.op.argument("dropout_p", 0.0):  # softmax, the mask that drops, what is left
        copies = sum(tensor.bytes for tensor, is_flat in zip((query, key, value), flat, strict=False) if not is_flat)
        own = tuple(flat[:3])
        return SavedForBackward((*own, *rest), (False,), copies + scores * 2 + queries * keys)
    if mask is not None and mask.gradient:  # scaled copies of q and k, softmax
        return SavedForBackward((False, False, True, *rest), (False,), query.bytes + key.bytes + scores)
    extra = queries * 4.0
    if mask is not None and mask.dtype == "bool":
        extra += mask.elements * query.item
    elif mask is not None:
        rest = (True, *rest[1:])
    return SavedForBackward((True, True, True, *rest), (True,), extra)


def _experts(call: LocalCall, signature: Signature) -> float:
    """Every token meets k experts, and what lies between their two matmuls is saved for each.

    Where tokens and experts are both split, it does not show whether what lies between is: it is taken to be whole.
    """
    values = signature.analysis.graph.values
    tokens, picked = call.inputs[0], call.inputs[1]
    width = values[call.op.inputs[0]].shape[-1]
    unsplit = tokens.elements == values[call.op.inputs[0]].elements
    between = 0.0
    for name, tensor in zip(call.op.inputs[3:], call.inputs[3:], strict=True):
        value = values[name]
        if len(value.shape) > 2 and value.shape[-2] != width:
            between += value.shape[-2] * (tensor.elements / value.elements if unsplit else 1.0)
    return picked.elements * tokens.item * (4 * width + 2 * between)

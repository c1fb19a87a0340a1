"""What an op needs while it runs, forward and backward, beside what goes in and comes out.

For each input backward makes a gradient in one of three ways: it passes the incoming one on
(PASS: an add, a view), makes a tensor of the input's size (FRESH), or makes one that has no
memory of its own (FREE: the gradient of a sum is one number, seen in a larger shape). Work
is what an op allocates and lets go again before it is done, in bytes. Both are what the ops
of torch and of the runtime do on a CPU; kernels for other devices have less work, not more.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ..rules import Signature
from .call import LocalCall, LocalTensor
from .saved_for_backward import split_classes
from .strides import VIEWS, op_kind


class GradientFlow(Enum):
    """How the gradient of an input is made."""

    NONE = 0
    PASS = 1
    FRESH = 2
    FREE = 3


@dataclass(frozen=True, slots=True)
class Flow:
    """Bytes of work forward and backward, and how backward makes the gradient of each input."""

    forward: float
    backward: float
    back: tuple[GradientFlow, ...]


ADDING = frozenset("add sub rsub".split())
JOINING = frozenset("cat stack concat hstack vstack".split())
HANDED_ON = (
    VIEWS - frozenset("slice select split split_with_sizes chunk unbind narrow diagonal unfold expand".split())
) | {"clone"}
"""Views whose backward is a view; those that pick a part fill the rest with zeros, and a stretched one sums."""

WORK = {  # kind: (forward, backward), in sizes of the result
    "dropout": (1.0, 1.0),  # x * mask, then * scale
    "native_dropout": (1.0, 1.0),
    "_native_batch_norm_legit_functional": (1.0, 3.0),
    "batch_norm": (1.0, 3.0),
    "_native_batch_norm_legit": (1.0, 3.0),
    "pow": (0.0, 2.0),  # x ** (n - 1), then * n
    "rms_norm": (1.0, 2.0),
    "mul": (0.0, 0.0),
    "rsqrt": (0.0, 2.0),
    "div": (0.0, 1.0),
}


def flow(call: LocalCall, signature: Signature) -> Flow:
    """The work of a call, and the way of its gradients."""
    kind = op_kind(call.op.target)
    out = call.outputs[0].bytes if call.outputs else 0.0
    back = tuple(
        _back(kind, tensor, call.outputs[0].elements) if tensor.gradient else GradientFlow.NONE
        for tensor in call.inputs
    )
    forward, backward = (factor * out for factor in WORK.get(kind, (0.0, 0.0)))
    if kind == "cross_entropy_loss":
        logits = call.inputs[0].bytes
        split = split_classes(call, signature)
        return Flow(logits if split else 0.0, 0.0 if split else logits, back)
    if kind.startswith("conv"):  # the CPU's kernels want another order of what they read and write
        forward = max(call.inputs[0].bytes, out)
    if kind == "scaled_dot_product_attention":
        forward, backward = _attention(call, signature)
    if kind in ("mul", "div", "where", "add", "sub", "rsub") and any(
        tensor.gradient and tensor.elements < call.outputs[0].elements for tensor in call.inputs
    ):
        backward = max(backward, out)  # made at full size, then summed
    return Flow(forward, backward, back)


def _back(kind: str, tensor: LocalTensor, size: float) -> GradientFlow:
    if kind in HANDED_ON or kind in JOINING:
        return GradientFlow.PASS
    if kind in ADDING and tensor.elements == size:
        return GradientFlow.PASS
    return GradientFlow.FREE if kind == "sum" else GradientFlow.FRESH


def _attention(call: LocalCall, signature: Signature) -> tuple[float, float]:
    """The scores, where the fused kernel can't be used."""
    shape = signature.analysis.graph.values[call.op.inputs[0]].shape
    keys = signature.analysis.graph.values[call.op.inputs[1]].shape[-2]
    query = call.inputs[0]
    scores = query.bytes / max(shape[-1], 1) * keys
    if call.op.argument("dropout_p", 0.0):
        return 2 * scores, 2 * scores
    if len(call.inputs) > 3 and call.inputs[3].gradient:
        return 2 * scores, 2 * scores
    return 0.0, 0.0


@dataclass(frozen=True, slots=True)
class ReshardMemory:
    """A reshard as memory sees it: whether each way gives a view, and its work in bytes."""

    shares: bool
    forward: float
    back: GradientFlow
    backward: float


def reshard_memory(kind: str, full: float, shard: float, simple: bool, first: bool, copies: bool) -> ReshardMemory:
    """A reshard between a full tensor of some bytes and a shard of it.

    simple    whether the shard is one run of the dim
    first     whether the dim is the first one, so that shards lie one after the other
    copies    whether collectives work on a copy (see `BackendTraits`)
    """
    gather = full if copies or not (simple and first) else 0.0  # shards come stacked, and are put side by side
    stack = (0.0 if simple and first else full) + (full if copies else 0.0)
    take = GradientFlow.PASS if simple else GradientFlow.FRESH
    table = {
        "all_reduce": ReshardMemory(False, 0.0, GradientFlow.PASS, 0.0),
        "replicate": ReshardMemory(True, 0.0, GradientFlow.FRESH, 0.0),
        "all_reduce_to_r": ReshardMemory(False, 0.0, GradientFlow.FRESH, 0.0),
        "all_gather": ReshardMemory(False, gather, take, 0.0),
        "all_gather_to_r": ReshardMemory(False, gather, GradientFlow.FRESH, stack),
        "shard": ReshardMemory(simple, 0.0, GradientFlow.FRESH, gather),
        "shard_from_r": ReshardMemory(simple, 0.0, GradientFlow.FRESH, 0.0),
        "reduce_scatter": ReshardMemory(False, stack, GradientFlow.FRESH, gather),
        "zero_pad": ReshardMemory(False, 0.0, take, 0.0),
        "all_to_all": ReshardMemory(False, 2 * shard, GradientFlow.FRESH, 2 * shard),
        "partial": ReshardMemory(True, 0.0, GradientFlow.PASS, 0.0),
        "invariant": ReshardMemory(True, 0.0, GradientFlow.PASS, 0.0),
        "reduce": ReshardMemory(False, 0.0, GradientFlow.NONE, 0.0),
    }
    return table[kind]

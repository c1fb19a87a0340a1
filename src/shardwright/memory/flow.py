"""What an op needs while it runs, forward and backward, beside what goes in and comes out.

For each input backward makes a gradient in one of three ways: it passes the incoming one on
(PASS: an add, a view), makes a tensor of the input's size (FRESH), or makes one that has no
memory of its own (FREE: the gradient of a sum is one number, seen in a larger shape). Work
is what an op allocates and releases before it is done, in bytes. Both are what the ops
of torch and of the runtime do on a CPU; kernels for other devices have less work, not more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache

from ..cost.saved_for_backward import saved_for_backward
from ..ops import spec_of
from ..ops.contexts import LocalCall, LocalTensor
from ..rules import Signature


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


def flow(call: LocalCall, signature: Signature, flat: Sequence[bool] | None = None) -> Flow:
    """The work of a call, and the way of its gradients. `flat`: whether inputs lie in one run (`Strides.flat`)."""
    spec = spec_of(call.op.target)
    ways = spec.back.split()
    back = tuple(
        _back(ways[min(at, len(ways) - 1)], tensor, call.outputs[0].elements) if tensor.gradient else GradientFlow.NONE
        for at, tensor in enumerate(call.inputs)
    )
    if callable(spec.work):
        forward, backward = spec.work(call, signature, flat)
    else:
        forward, backward = (factor * call.outputs[0].bytes if call.outputs else 0.0 for factor in spec.work)
    return Flow(forward, backward, back)


def _back(how: str, tensor: LocalTensor, size: float) -> GradientFlow:
    if how == "pass" or (how == "pass_same" and tensor.elements == size):
        return GradientFlow.PASS
    return GradientFlow.FREE if how == "free" else GradientFlow.FRESH


def op_bytes(call: LocalCall, signature: Signature, backward: bool) -> float:
    """The bytes that an op takes while it runs, without its parameters: the more of forward and backward."""
    own, extra = flow(call, signature), saved_for_backward(call, signature).extra
    inputs = [0.0 if tensor.parameter else tensor.bytes for tensor in call.inputs]
    outputs = sum(tensor.bytes for tensor in call.outputs)
    fresh = sum(size for size, how in zip(inputs, own.back, strict=True) if how is GradientFlow.FRESH)
    behind = outputs + fresh + own.backward if backward and call.gradient else 0.0
    return extra + max(sum(inputs) + outputs + own.forward, behind)


@dataclass(frozen=True, slots=True)
class ReshardMemory:
    """A reshard as memory sees it: whether each way gives a view, and its work in bytes."""

    shares: bool
    forward: float
    back: GradientFlow
    backward: float


@lru_cache(maxsize=2**12)
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

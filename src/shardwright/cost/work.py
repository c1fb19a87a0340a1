"""How much arithmetic an op does, forward, at global shape."""

from __future__ import annotations

import math

from ..ops import Kernel, spec_of
from ..ops.user_calls import OPAQUE, has_experts
from ..rules import Analysis, OpCall, Signature


def is_matmul(signature: Signature) -> bool:
    spec = spec_of(signature.op.target)
    if not signature.op.target.startswith("aten.") and spec.kernel is None:  # one that sums something is taken for one
        return has_experts(signature.op) or bool(signature.rule and signature.rule.sums)
    return spec.is_matmul


def flops(signature: Signature) -> float:
    """Two for each multiply-add of a matmul, one for each element of anything else, unless an op says."""
    op, values = signature.op, signature.analysis.graph.values
    spec = spec_of(op.target)
    if spec.flops is not None:
        call = OpCall(op, tuple(values[name] for name in op.inputs), tuple(values[name] for name in op.outputs))
        return spec.flops(call)
    size = max((values[name].elements for name in op.outputs), default=0)
    if not is_matmul(signature):
        return float(size)
    if spec.kernel is Kernel.ATTENTION:
        return 4.0 * math.prod(values[op.inputs[0]].shape) * values[op.inputs[1]].shape[-2]
    atoms = signature.analysis.atoms
    inside = [label for label in (signature.rule.sums if signature.rule else ()) if label in signature.labels]
    work = 2.0 * size * math.prod(atoms.product(signature.labels[label]) for label in inside)
    if spec.kernel is Kernel.CONVOLUTION:
        work *= math.prod(values[op.inputs[1]].shape[2:])
    return work


def moved_bytes(signature: Signature) -> float | None:
    """What a forward pass reads and writes, at global shape, where the op says it."""
    op, values, spec = signature.op, signature.analysis.graph.values, spec_of(signature.op.target)
    if spec.bytes is None:
        return None
    return spec.bytes(OpCall(op, tuple(values[name] for name in op.inputs), tuple(values[name] for name in op.outputs)))


def training_flops(analysis: Analysis) -> float:
    """The products of one call, forward and backward, at global shape: what "model flops" usually means.

    Backward has one product of the same size for each operand that has a gradient, and none is counted twice that a
    plan recomputes. Attention counts whole, also where a mask leaves half of it out.
    """
    total, values = 0.0, analysis.graph.values
    for signature in analysis.signatures.values():
        if is_matmul(signature) or signature.op.target == OPAQUE:
            operands = [values[name] for name in signature.op.inputs if len(values[name].shape) > 1]
            total += flops(signature) * (1 + min(2, sum(operand.gradient for operand in operands)))
    return total

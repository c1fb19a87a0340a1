"""How much arithmetic an op does, forward, at global shape."""

from __future__ import annotations

import math
from functools import cache

from ..rules import Analysis, Signature
from ..rules.user_calls import OPAQUE

PRODUCTS = ("linear", "mm", "bmm", "matmul", "einsum", "convolution", "conv", "addmm", "baddbmm", "mv", "attention")


def is_matmul(signature: Signature) -> bool:
    if not signature.op.target.startswith("aten."):  # an own op that sums something is taken for a product
        return is_experts(signature) or bool(signature.rule and signature.rule.sums)
    return _is_product(signature.op.target)


@cache
def _is_product(target: str) -> bool:
    return any(word in target.split(".")[1] for word in PRODUCTS)


def is_experts(signature: Signature) -> bool:
    """A layer of experts, which is kept as one op."""
    return signature.op.target == OPAQUE and bool(signature.op.argument("rule"))


def flops(signature: Signature) -> float:
    """Two for each multiply-add of a product, one for each element of anything else."""
    atoms, values = signature.analysis.atoms, signature.analysis.graph.values
    size = max((values[name].elements for name in signature.op.outputs), default=0)
    if signature.op.target == OPAQUE and not is_experts(signature):
        return max(float(size), _inside(signature))
    if not is_matmul(signature):
        return float(size)
    if is_experts(signature):  # each token meets k of the experts
        shapes = [values[name].shape for name in signature.op.inputs]
        return 2.0 * math.prod(shapes[1]) * sum(math.prod(shape[1:]) for shape in shapes[3:] if len(shape) > 2)
    if "attention" in signature.op.target:
        q, k = values[signature.op.inputs[0]].shape, values[signature.op.inputs[1]].shape
        return 4.0 * math.prod(q) * k[-2]
    inside = [label for label in (signature.rule.sums if signature.rule else ()) if label in signature.labels]
    work = 2.0 * size * math.prod(atoms.product(signature.labels[label]) for label in inside)
    if "conv" in signature.op.target:
        work *= math.prod(values[signature.op.inputs[1]].shape[2:])
    return work


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


def _inside(signature: Signature) -> float:
    """What an opaque submodule may do: every row meets every parameter, since nobody looks inside."""
    values, op = signature.analysis.graph.values, signature.op
    positions = math.prod(values[op.outputs[0]].shape[:-1]) if op.outputs else 0
    weights = op.inputs[len(op.argument("tensors")) :]
    return 2.0 * positions * sum(values[name].elements for name in weights)

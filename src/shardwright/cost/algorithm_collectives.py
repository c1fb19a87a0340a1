"""What the algorithms of split ops send inside, in addition to the reshards between ops.

Most splits need none: a matmul over split channels leaves a pending sum, and a lookup in a table of split rows
too; converters sum them, and are priced as converters. These talk by themselves (`runtime/` has them):

    cross entropy, classes split     all_reduce of the largest, and of two or three sums, for each row
    a mean over labels, rows split   all_reduce of one count
    batch norm, rows split           all_gather of 3 numbers a channel; backward all_reduce of 2
    experts                          all_to_all of the tokens, their weights and experts, and back; backward again

Bytes are counted as in `cluster/collective.py`. Algorithms of registered ops are not known here, and send nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple

from ..cluster import Collective
from ..layout import Mesh
from ..rules import FAN, ROWS, Signature
from .call import LocalCall, local_call
from .training import TrainingSetup

INT = 8
WIDE = {"float64": 8}
"""Sums are made in float32, or wider."""


class AlgorithmCollective(NamedTuple):
    """One collective of an op."""

    collective: Collective
    bytes: float
    axes: tuple[str, ...]
    when: Literal["forward", "backward"]


def algorithm_collectives(
    signature: Signature, choice: Mapping[str, str], mesh: Mesh, training: TrainingSetup
) -> tuple[AlgorithmCollective, ...]:
    """What an op sends by itself under a choice {axis: role}, forward and backward."""
    axes = _axes_by_algorithm(signature, choice, mesh)
    if not axes:
        return ()
    call = local_call(signature, choice, mesh, training)
    collectives: list[AlgorithmCollective] = []
    if signature.op.target.startswith(("aten.cross_entropy_loss", "aten.nll_loss")):
        collectives += _loss(call, axes)
    if "batch" in axes and "batch_norm" in signature.op.target:
        collectives += _batch_norm(signature, call, axes["batch"], mesh)
    if "experts" in axes:
        collectives += _experts(signature, call, axes["experts"], mesh)
    return tuple(collectives)


def _axes_by_algorithm(signature: Signature, choice: Mapping[str, str], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """For each algorithm the axes that it splits on, in the order of the mesh."""
    axes_of: dict[str, tuple[str, ...]] = {}
    known = signature.rule.algorithms if signature.rule else {}
    if not known:
        return axes_of
    for axis in mesh.axes:
        picked = choice.get(axis.name)
        if picked is None or axis.size == 1 or picked == FAN or picked.startswith(ROWS):
            continue
        algorithm = known.get(signature.role(picked).label)
        if algorithm is not None:
            axes_of[algorithm.name] = (*axes_of.get(algorithm.name, ()), axis.name)
    return axes_of


def _loss(call: LocalCall, axes: Mapping[str, tuple[str, ...]]) -> list[AlgorithmCollective]:
    collectives = []
    if "classes" in axes:
        row_bytes = call.inputs[1].elements * WIDE.get(call.inputs[0].dtype, 4)
        sums = 3 if call.op.argument("label_smoothing", 0.0) else 2
        collectives += [
            AlgorithmCollective("all_reduce", count * row_bytes, axes["classes"], "forward") for count in (1, sums)
        ]
    if "rows" in axes:
        collectives.append(AlgorithmCollective("all_reduce", INT, axes["rows"], "forward"))
    return collectives


def _batch_norm(signature: Signature, call: LocalCall, axes: tuple[str, ...], mesh: Mesh) -> list[AlgorithmCollective]:
    x = call.inputs[0]
    size = WIDE.get(x.dtype, 4)
    parameter_elements = [
        tensor.elements for tensor in call.inputs[1:]
    ]  # weights and statistics, split as the channels are
    channels = (
        parameter_elements[0]
        if parameter_elements
        else float(signature.analysis.graph.values[signature.op.inputs[0]].shape[1])
    )
    ranks = math.prod(mesh.axis(name).size for name in axes)
    collectives = [AlgorithmCollective("all_gather", ranks * 3 * channels * size, axes, "forward")]
    if call.gradient and x.gradient:
        collectives.append(AlgorithmCollective("all_reduce", 2 * channels * size, axes, "backward"))
    return collectives


def _experts(signature: Signature, call: LocalCall, axes: tuple[str, ...], mesh: Mesh) -> list[AlgorithmCollective]:
    """As if every expert got as many tokens as the others."""
    hidden, index, weights = call.inputs[:3]
    ranks = math.prod(mesh.axis(name).size for name in axes)
    routed = hidden.bytes * signature.analysis.graph.values[signature.op.inputs[1]].shape[-1]  # once for each expert
    shares = index.elements * weights.item
    sizes = (ranks * INT, routed, shares, index.elements * INT, routed)
    collectives = [AlgorithmCollective("all_to_all", size, axes, "forward") for size in sizes]
    if call.gradient:
        back = [routed] * (1 + hidden.gradient) + [shares] * weights.gradient
        collectives += [AlgorithmCollective("all_to_all", size, axes, "backward") for size in back]
    return collectives

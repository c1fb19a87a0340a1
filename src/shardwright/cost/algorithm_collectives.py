"""What the algorithms of split ops send inside, in addition to the reshards between ops.

Most splits need none: a matmul over split channels leaves a pending sum, and a lookup in a table of split rows
too; reshards sum them, and are priced as reshards. Losses over split classes or rows, batch norms over a split
batch and experts communicate by themselves: their definitions say what they send (`OpSpec.collectives`).

Bytes are counted as in `cluster/collective.py`. Algorithms of registered ops are not known here, and send nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..layout import Mesh
from ..ops import spec_of
from ..ops.contexts import AlgorithmCollective
from ..rules import FAN, PASS_PARTIAL, Signature
from .call import local_call
from .training import TrainingSetup


def algorithm_collectives(
    signature: Signature, choice: Mapping[str, str], mesh: Mesh, training: TrainingSetup
) -> tuple[AlgorithmCollective, ...]:
    """What an op sends by itself under a choice {axis: role}, forward and backward."""
    sends = spec_of(signature.op.target).collectives
    axes = _axes_by_algorithm(signature, choice, mesh) if sends is not None else {}
    if sends is None or not axes:
        return ()
    return tuple(sends(local_call(signature, choice, mesh, training), signature, axes, mesh))


def _axes_by_algorithm(signature: Signature, choice: Mapping[str, str], mesh: Mesh) -> dict[str, tuple[str, ...]]:
    """For each algorithm the axes that it splits on, in the order of the mesh."""
    axes_of: dict[str, tuple[str, ...]] = {}
    known = signature.rule.algorithms if signature.rule else {}
    if not known:
        return axes_of
    for axis in mesh.axes:
        picked = choice.get(axis.name)
        if picked is None or axis.size == 1 or picked == FAN or picked.startswith(PASS_PARTIAL):
            continue
        algorithm = known.get(signature.role(picked).label)
        if algorithm is not None:
            axes_of[algorithm.name] = (*axes_of.get(algorithm.name, ()), axis.name)
    return axes_of

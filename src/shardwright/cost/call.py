"""An op as one device runs it: the tensors that it has of it, and its arithmetic."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..ir import Graph
from ..layout import Layout, Mesh, chunk_bounds
from ..ops import Kernel, spec_of
from ..ops.contexts import LocalCall, LocalTensor
from ..rules import FAN, PASS_PARTIAL, Signature
from .training import TrainingSetup
from .work import flops, moved_bytes


def local_call(signature: Signature, choice: Mapping[str, str], mesh: Mesh, training: TrainingSetup) -> LocalCall:
    """The call that a choice makes of an op."""
    inputs, outputs = signature.layouts(choice, mesh)
    parts, moved = work_parts(signature, choice, mesh), moved_bytes(signature)
    return LocalCall(
        op=signature.op,
        flops=flops(signature) / parts,
        moved=None if moved is None else moved / parts,
        inputs=tuple(
            local_tensor(signature, name, layout, mesh, training)
            for name, layout in zip(signature.op.inputs, inputs, strict=True)
        ),
        outputs=tuple(
            local_tensor(signature, name, layout, mesh, training)
            for name, layout in zip(signature.op.outputs, outputs, strict=True)
        ),
        copies=copies(signature),
        multiplies_in=_multiplies_in(signature, training),
    )


def _multiplies_in(signature: Signature, training: TrainingSetup) -> str | None:
    """Linear layers may multiply in float8: products of values in 16 bits and a parameter."""
    graph = signature.analysis.graph
    if training.matmul is None or spec_of(signature.op.target).kernel is not Kernel.MATMUL:
        return None
    narrow = all(training.item(graph.values[name]) <= 2 for name in signature.op.inputs)
    return training.matmul if narrow and any(_is_weight(graph, name) for name in signature.op.inputs) else None


def _is_weight(graph: Graph, name: str) -> bool:
    """Whether a value is a parameter, or a cast of one."""
    producer = graph.producer.get(name)
    if producer is not None and len(producer.inputs) == 1:
        source, result = graph.values[producer.inputs[0]], graph.values[name]
        if source.shape == result.shape and source.dtype != result.dtype:
            name = producer.inputs[0]
    return graph.parameter_of(name) is not None


def copies(signature: Signature) -> bool:
    """Whether a reshape has to copy: it joins dims of what was turned. Values have no strides, so this is a guess.

    Fused attention writes its result turned already, so that the usual transpose and reshape after it are views.
    """
    op, graph = signature.op, signature.analysis.graph
    if not spec_of(op.target).may_copy or len(graph.values[op.outputs[0]].shape) >= len(
        graph.values[op.inputs[0]].shape
    ):
        return False
    before = graph.producer.get(op.inputs[0])
    if before is None or not spec_of(before.target).turns:
        return False
    source = graph.producer.get(before.inputs[0])
    return source is None or spec_of(source.target).kernel is not Kernel.ATTENTION


def local_tensor(signature: Signature, name: str, layout: Layout, mesh: Mesh, training: TrainingSetup) -> LocalTensor:
    graph = signature.analysis.graph
    value = graph.values[name]
    return LocalTensor(
        elements=local_elements(value.shape, layout, mesh),
        item=training.item(value),
        dtype=training.dtype(value),
        gradient=value.gradient,
        parameter=graph.parameter_of(name) is not None,
    )


def local_elements(shape: tuple[int, ...], layout: Layout, mesh: Mesh) -> float:
    """How many elements the first device has, which has the most."""
    elements = float(math.prod(shape))
    for shards in layout.shards:
        for shard in shards:
            elements *= shard.local(mesh.axis(shard.axis).size, 0) / shard.elements
    return elements


def work_parts(signature: Signature, choice: Mapping[str, str], mesh: Mesh) -> float:
    """Into how many parts the arithmetic of an op is divided, by the part of the device that has the most."""
    parts = 1.0
    for axis in mesh.axes:
        picked = choice.get(axis.name)
        if picked is not None and picked != FAN and not picked.startswith(PASS_PARTIAL):
            role = signature.role(picked)
            parts *= role.size / chunk_bounds(role.size, axis.size, 0)[1]
    return parts

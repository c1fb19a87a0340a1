"""The pass that joins a linear and the cross entropy of its logits into one call, which makes them in chunks."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..errors import PlanError, raise_all
from ..ir import Graph, Op
from ..ir.graph import Slot
from ..ops.chunked_losses import CHUNKED, LOSSES
from .loss_head import HeadFault, LossHead, OpFlow, find_head
from .program import LoweredProgram

CARRIED = ("samples", "classes", "sharding", "size", "ignore_index", "reduction", "label_smoothing", "reduced")
"""Arguments of a loss that are those of the call."""


def check_chunked(graph: Graph, chunked: Mapping[str, int]) -> None:
    """Refuse losses whose logits can't be made in so many chunks, all at once."""
    flow, faults = OpFlow.of_graph(graph), list(unknown_losses(graph, chunked))
    for name in chunked:
        if name in graph.by_name:
            try:
                find_head(graph.by_name[name], flow)
            except HeadFault as fault:
                faults.append(f"it computes {graph.by_name[name]} in chunks, but {fault}")
    raise_all(PlanError, "the plan does not fit the model:", faults)


def unknown_losses(graph: Graph, chunked: Mapping[str, int]) -> Iterator[str]:
    """What is wrong with the names and the numbers of chunks of a plan's losses."""
    for name, chunks in chunked.items():
        op = graph.by_name.get(name)
        if op is None:
            losses = ", ".join(repr(op.name) for op in graph.ops if op.target in LOSSES)
            known = f"the losses are {losses}" if losses else "it has no cross_entropy"
            yield f"it chunks the loss {name!r}, which the model does not have; {known}"
        elif op.target in LOSSES:
            rows = rows_of(op, graph)
            if not isinstance(chunks, int) or isinstance(chunks, bool) or not 1 <= chunks <= rows:
                yield f"it computes {op} in {chunks!r} chunks, and there are {rows} rows; use 1 to {rows}"


def faults_of_losses(graph: Graph) -> dict[str, str | None]:
    """For each cross entropy of a graph why its logits can't be made in chunks, None if they can."""
    flow, faults = OpFlow.of_graph(graph), dict[str, str | None]()
    for op in graph.ops:
        if op.target in LOSSES:
            try:
                find_head(op, flow)
                faults[op.name] = None
            except HeadFault as fault:
                faults[op.name] = str(fault)
    return faults


def rows_of(loss: Op, graph: Graph) -> int:
    """How many rows a loss has."""
    target = loss.tensor("target")
    return graph.values[target].elements if target is not None else 0


def chunk_losses(program: LoweredProgram) -> LoweredProgram:
    """Logits that only their loss reads are made some rows at a time, in one call with it."""
    for name, chunks in program.chunked.items():
        program = _joined(program, name, chunks)
    return program


def chunk_where_possible(program: LoweredProgram) -> LoweredProgram:
    """The same for a search, which finds out by it whether a candidate leaves logits to their loss alone."""
    for name, chunks in program.chunked.items():
        try:
            program = _joined(program, name, chunks)
        except PlanError:
            continue
    return program


def joined_losses(program: LoweredProgram) -> dict[str, int]:
    """The losses of a program that are computed in chunks."""
    return {op.name: op.argument("chunks") for op in program.body if op.target == CHUNKED}


def _joined(program: LoweredProgram, name: str, chunks: int) -> LoweredProgram:
    loss = next((op for op in program.body if op.name == name), None)
    if loss is None:
        raise PlanError(f"the plan computes {name!r} in chunks, which the program does not have: nothing reads it")
    check_chunked(program.graph, {name: chunks})  # whose messages are about the model, and not about its shards
    users = program.users()
    flow = OpFlow(
        makers={output: op for op in program.body for output in op.outputs},
        readers=lambda value: users.get(value, []),
        values=program.values,
        needed=program.needed(),
    )
    try:
        head = find_head(loss, flow)
    except HeadFault as fault:
        raise PlanError(
            f"the plan computes {loss} in chunks, but {fault}; split the linear and the loss alike (its classes or "
            "rows), or leave chunked_loss out"
        ) from None
    target = loss.inputs[loss.argument("target").index]
    first = dict.fromkeys(program.mesh.names, 0)
    rows = math.prod(program.layouts[target].local_shape(program.values[target].shape, program.mesh.sizes, first))
    if chunks > rows:
        raise PlanError(f"the plan computes {loss} in {chunks} chunks, and a rank has {rows} rows; use {rows} at most")
    call, gone = _call(loss, head, chunks), {op.name for op in head.ops} - {name}
    body: list[Op] = []
    waiting: list[Op] = []  # what reads the logsumexp, which is there only after the call
    late = set(head.logsumexp.outputs) if head.logsumexp is not None else set[str]()
    for op in program.body:
        if op.name == name:
            body += [call, *waiting]
            waiting, late = [], set()
        elif op.name not in gone and any(value in late for value in op.inputs):
            waiting.append(op)
            late |= set(op.outputs)
        elif op.name not in gone:
            body.append(op)
    return program.with_(body=tuple(body))


def _call(loss: Op, head: LossHead, chunks: int) -> Op:
    """The call that stands for a loss and its head."""
    tensors = {"self": head.x, "weight": head.weight, "target": loss.tensor("target"), "bias": head.bias}
    tensors |= {"class_weight": loss.tensor("weight"), "count": loss.tensor("count")}
    inputs = [value for value in tensors.values() if value is not None]
    slots = [(key, Slot(at)) for at, key in enumerate(key for key, value in tensors.items() if value is not None)]
    flags: dict[str, object] = {"chunks": chunks, "slices": head.slices or None, "steps": head.steps or None}
    if head.logsumexp is not None:
        flags["logsumexp"] = "flat" if head.flat else "rows"
    flags |= {key: loss.argument(key) for key in CARRIED}
    arguments = (*slots, *((key, value) for key, value in flags.items() if value is not None))
    outputs = loss.outputs if head.logsumexp is None else (*loss.outputs, *head.logsumexp.outputs)
    return Op(
        name=loss.name, target=CHUNKED, inputs=tuple(inputs), outputs=outputs, arguments=arguments,
        source=loss.source, module_path=loss.module_path, region=loss.region, no_grad=loss.no_grad,
    )  # fmt: skip

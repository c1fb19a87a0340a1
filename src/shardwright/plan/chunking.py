"""Chunked losses in a plan: which are, and in how many chunks of rows a rank makes their logits.

More chunks need less memory and cost no more arithmetic, as long as each has rows enough to keep a device busy. The
usual number makes a chunk of logits about as large as what the linear reads, as far as chunks keep `ROWS` rows.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..ir import Graph
from ..layout import Mesh
from ..lower.chunked_loss import faults_of_losses, rows_of
from ..lower.loss_head import LossHead, OpFlow, find_head
from ..rules import Analysis
from .plan import Plan

ChunkCounts = Mapping[str, int | None]
"""The chunks of each loss, None for the usual number."""

USUAL = 8
"""Chunks of a loss that has few rows, or few classes."""

ROWS = 512
"""Rows that a chunk should have: with fewer, the weight is read more often than matmuls can hide."""


def usual_chunks(rows: int, classes: int, features: int) -> int:
    """The usual number of chunks for a loss with so many rows on a rank."""
    most = max(rows // ROWS, USUAL)
    return max(1, min(rows, most, max(USUAL, -(-classes // features))))


def heads_of(graph: Graph, chunked: ChunkCounts) -> dict[str, LossHead]:
    """The heads of losses that can be chunked."""
    flow = OpFlow.of_graph(graph)
    return {name: find_head(graph.by_name[name], flow) for name in chunked}


def resolved_chunks(
    analysis: Analysis, chunked: ChunkCounts, choices: Mapping[str, Mapping[str, str]], mesh: Mesh
) -> dict[str, int]:
    """The chunks of each loss as numbers, by the rows that a rank has under these choices."""
    counts: dict[str, int] = {}
    graph, first = analysis.graph, dict.fromkeys(mesh.names, 0)
    for name, head in heads_of(graph, chunked).items():
        count, op = chunked[name], graph.by_name[name]
        if count is None:
            layouts, _ = analysis.signatures[name].layouts(choices.get(name, {}), mesh)
            target = op.argument("target").index
            local = layouts[target].local_shape(graph.values[op.inputs[target]].shape, mesh.sizes, first)
            classes, features = graph.values[head.weight].shape
            count = usual_chunks(math.prod(local), classes, features)
        counts[name] = count
    return counts


def continued_chunks(plan: Plan, graph: Graph, microbatches: int = 1) -> tuple[dict[str, int], tuple[str, ...]]:
    """The chunks of a plan's losses in one more specialization, which may have fewer rows, and notes on the others."""
    counts: dict[str, int] = {}
    notes: list[str] = []
    faults = faults_of_losses(graph)
    for name, chunks in (item for stage in plan.stages for item in stage.chunked_loss.items()):
        if name not in faults:
            continue
        op, fault = graph.by_name[name], faults[name]
        if fault is None:
            counts[name] = min(chunks, max(1, rows_of(op, graph) // (plan.size * microbatches)))
        else:
            notes.append(f"{op} is not chunked in {graph.entry}: {fault}")
    return counts, tuple(notes)


__all__ = ["ChunkCounts", "LossHead", "continued_chunks", "heads_of", "resolved_chunks", "usual_chunks"]

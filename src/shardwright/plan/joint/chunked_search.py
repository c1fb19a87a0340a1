"""Whether a search chunks the losses of a model: where memory is short, it is tried with and without.

Logits in chunks cost a matmul more in backward, and free the memory of the logits. So a plan that memory does not limit
is never faster with them. One that it does limit may be: what they free is spent on fewer collectives, on less
activation checkpointing, on larger microbatches, or makes the model fit at all.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace

from ...cluster import Cluster
from ...cost import TrainingSetup
from ...errors import PlanError
from ...ir import Graph
from ...lower.chunked_loss import faults_of_losses
from ...rules import Analysis
from ..clash import with_memory
from ..limits import Limits, bind
from ..search_options import SearchOptions
from .planner import JointResult, find_plan

WORTH = 0.01
"""The share of a device's memory that logits must have, spread over all devices, for chunks to be tried."""

COPIES = 3
"""Tensors of the size of logits that a step has at once: themselves, what backward saves, and their gradient."""


def find_best_plan(
    analysis: Analysis, cluster: Cluster, training: TrainingSetup, options: SearchOptions, *, size: int
) -> JointResult:
    """The best plan for a graph, with chunked losses if that is faster, or if nothing fits without."""
    began = time.monotonic()
    limits = bind(with_memory(options.constraints, options.memory, cluster, training), analysis)
    losses = _worth_trying(analysis.graph, limits, training, size)
    result: JointResult | None = None
    fault: PlanError | None = None
    try:
        result = find_plan(analysis, cluster, training, options, size=size)
    except PlanError as error:
        fault = error
    if losses and (result is None or _is_limited(result, options)):
        left = options.seconds - (time.monotonic() - began)
        chunked = replace(options, chunked=losses, seconds=max(left, 0.0))
        try:
            other = find_plan(analysis, cluster, training, chunked, size=size)
        except PlanError:
            other = None
        faster = result is None or (other is not None and other.seconds < result.seconds * (1.0 - options.slack))
        if other is not None and faster and any(stage.chunked_loss for stage in other.plan.segments):
            note = f"the search: {_why(result, other)}"
            return replace(other, plan=replace(other.plan, notes=(*other.plan.notes, note)))
    if result is None:
        assert fault is not None
        raise fault
    return result


def _worth_trying(graph: Graph, limits: Limits, training: TrainingSetup, size: int) -> tuple[str, ...]:
    """The losses that no constraint speaks of, that can be chunked, and whose logits are large."""
    if not graph.entry.startswith("train"):
        return ()
    names = []
    for name, fault in faults_of_losses(graph).items():
        logits = graph.values[graph.by_name[name].inputs[0]]
        large = COPIES * logits.elements * training.item(logits) / size > WORTH * limits.memory
        if fault is None and large and name not in limits.chunked and name not in limits.unchunked:
            names.append(name)
    return tuple(names)


def _is_limited(result: JointResult, options: SearchOptions) -> bool:
    """Whether a plan would be faster if there were more memory, as far as is known."""
    if result.pipeline is not None or result.flat is None:
        return True
    unlimited = min((mesh.bound for mesh in result.flat.meshes), default=math.inf)
    return result.seconds > unlimited * (1.0 + max(options.aim, options.slack))


def _why(result: JointResult | None, other: JointResult) -> str:
    names = ", ".join(name for stage in other.plan.segments for name in stage.chunked_loss)
    if result is None:
        return f"logits in chunks ({names}), without which nothing fits"
    longer = result.seconds / other.seconds - 1
    return f"logits in chunks ({names}), without which the best plan takes {longer:.1%} longer"

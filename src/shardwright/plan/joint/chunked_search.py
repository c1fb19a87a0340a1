"""Whether a search chunks the losses of a model: where memory is short, it is tried with and without.

Logits in chunks cost a matmul more in backward, and free the memory of the logits. So a plan that memory does not limit
is never faster with them. One that it does limit may be: what they free is spent on fewer collectives, on less
activation checkpointing, on larger microbatches, or makes the model fit at all.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace

from ...cluster import Cluster
from ...cost import TrainingSetup, local_call
from ...cost.time import op_time
from ...errors import PlanError
from ...ir import Graph
from ...lower.chunked_loss import faults_of_losses
from ...rules import Analysis
from ..binder import bind
from ..chunking import heads_of
from ..clash import with_memory
from ..limits import Limits
from ..op_kinds import ALONE
from ..search_options import SearchOptions
from .planner import JointResult, find_plan

WORTH = 0.01
"""The share of a device's memory that logits must have, spread over all devices, for chunks to be tried."""

GAIN = 0.05
"""How much faster a plan must be able to get for the search to be done again."""

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
    if losses and (result is None or _may_gain(result, losses, analysis, cluster)):
        left = options.seconds - (time.monotonic() - began)
        upper = math.inf if result is None else result.seconds * (1.0 - options.slack)
        chunked = replace(options, chunked=losses, seconds=max(left, 0.0), upper=upper)
        try:
            other = find_plan(analysis, cluster, training, chunked, size=size)
        except PlanError:
            other = None
        if other is not None and other.seconds < upper and any(stage.chunked_loss for stage in other.plan.stages):
            note = f"the search: {_why(result, other)}"
            flat = other.flat or (result.flat if result is not None else None)  # which may be slower, and fits
            return replace(other, flat=flat, plan=replace(other.plan, notes=(*other.plan.notes, note)))
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


def _may_gain(result: JointResult, losses: Sequence[str], analysis: Analysis, cluster: Cluster) -> bool:
    """Whether a plan would be `GAIN` faster if memory were no limit and the logits were made twice, as far as is known.

    The flat search has a bound without the limit for each of its meshes; the matmul again is shared by all devices.
    """
    if result.flat is None:
        return True
    unlimited = min((mesh.bound for mesh in result.flat.meshes), default=math.inf)
    device, training = cluster.device(0), result.flat.best.tables.training
    heads = heads_of(analysis.graph, dict.fromkeys(losses)).values()
    matmuls = [analysis.signatures[head.linear.name] for head in heads]
    again = sum(op_time(local_call(matmul, {}, ALONE, training), device).forward for matmul in matmuls)
    size = result.flat.plan.size
    return result.seconds > (unlimited + again / size) * (1.0 + GAIN)


def _why(result: JointResult | None, other: JointResult) -> str:
    names = ", ".join(name for stage in other.plan.stages for name in stage.chunked_loss)
    if result is None:
        return f"logits in chunks ({names}), without which nothing fits"
    longer = result.seconds / other.seconds - 1
    return f"logits in chunks ({names}), without which the best plan takes {longer:.1%} longer"

"""What a plan costs: the time of a step and the memory of a device, and where they come from.

A plan is priced with the tables that the search uses, all its choices fixed; so a plan that a person or a policy
made and one that the search found are compared on equal terms. Memory is simulated (`simulate_memory`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..cost.reshard_tables import ReshardTables
from ..cost.resources import Resource, phases, seconds
from ..errors import PlanError
from ..ir import Graph
from ..memory import MemoryPeak
from ..rules import Analysis
from .digest import AxisUse, axis_uses, fold_parts, stored_bytes
from .op_kinds import OpKinds
from .plan import Plan
from .priced_parts import PricedCollective, PricedPart, PricedTables, totals
from .problem_structure import ProblemStructure
from .search import solve
from .spaces import ChoiceSpaces, FixedChoices
from .storage_options import StoragePricing
from .tables import Tables
from .throughput import throughput

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "buffers", "inputs")


@dataclass(frozen=True, kw_only=True)
class PlanPrice:
    """A step of a plan on a cluster."""

    made_for: Mapping[str, Any]  # the cluster, the batch, the training
    used: np.ndarray
    overlap: float
    training: TrainingSetup
    throughput: Mapping[str, Any]
    sent: tuple[PricedCollective, ...]
    ops: tuple[PricedPart, ...]  # the most expensive first
    edges: tuple[PricedPart, ...]
    axes: tuple[AxisUse, ...]
    stored: Mapping[str, float]  # bytes of full parameters, by how they are stored
    memory: MemoryPeak
    limit: float
    priced: PricedTables  # of which the parts are read

    @staticmethod
    def time_of(used: np.ndarray, overlap: float, training: TrainingSetup) -> float:
        """Seconds of a step that uses so much."""
        return seconds(used, phases(overlap, training.accumulate))

    @property
    def seconds(self) -> float:
        return self.time_of(self.used, self.overlap, self.training)

    @property
    def peak_memory(self) -> float:
        """Bytes of a device at the worst moment."""
        return self.memory.peak

    @property
    def compute(self) -> float:
        both = self.used[Resource.COMPUTE_FORWARD] + self.used[Resource.COMPUTE_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def waited(self) -> float:
        """Blocking communication: the next op waits for it."""
        both = self.used[Resource.SEND_FORWARD] + self.used[Resource.SEND_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def overlapped(self) -> float:
        both = self.used[Resource.BESIDE_FORWARD] + self.used[Resource.BESIDE_BACKWARD]
        return float(both) * self.training.accumulate

    @property
    def update(self) -> float:
        return float(self.used[Resource.UPDATE])

    @property
    def exposed(self) -> float:
        """Exposed communication: the overlapped part that kernels do not hide."""
        shown = self.seconds - self.compute - self.waited - self.update
        return shown if shown > 1e-9 * self.seconds else 0.0  # else a rounding error

    def as_json(self) -> dict[str, Any]:
        """For a plan file."""
        return {
            "for": dict(self.made_for),
            "seconds": short(self.seconds),
            "compute": short(self.compute),
            "blocking": short(self.waited),
            "overlapped": short(self.overlapped),
            "exposed": short(self.exposed),
            "update": short(self.update),
            "throughput": dict(self.throughput),
            "axes": [use.as_json() for use in self.axes],
            "stored": {how: int(size) for how, size in self.stored.items()},
            "sent": [sent.as_json() for sent in self.sent],
            "ops": fold_parts(self.ops),
            "edges": fold_parts(self.edges),
            **memory_as_json(self.memory, self.limit),
        }


def memory_as_json(memory: MemoryPeak, limit: float) -> dict[str, Any]:
    """The memory of a device, by kind and at its peak, for a plan file."""
    return {
        "memory": {"peak": int(memory.peak), **{kind: int(getattr(memory, kind)) for kind in MEMORY_KINDS}},
        "at": {"phase": memory.at[1], "op": memory.at[0]},
        "limit": int(limit),
    }


def price(
    analysis: Analysis,
    cluster: Cluster,
    training: TrainingSetup,
    plan: Plan,
    *,
    replica_axes: tuple[str, ...] = (),
    limit: float | None = None,
    memory: MemoryPeak | None = None,
) -> PlanPrice:
    """What a step of a plan's entry for this graph costs.

    limit     the memory limit of a device in bytes, if less than it has
    memory    the result of a memory simulation, if there was one
    """
    entry = analysis.graph.entry
    if entry not in plan.entries:
        raise PlanError(f"the plan has no entry {entry!r}; it has {', '.join(plan.entries)}")
    choices = plan.choices(entry)
    recompute = plan.entries[entry][0].recompute
    decisions: dict[str, object] = {**choices, **plan.storage}
    kinds = OpKinds(analysis, training, decisions, plan.entries[entry][0].chunked_loss)
    skeleton = ProblemStructure(kinds, {path: (frozenset([path]),) for path in recompute})
    spaces = ChoiceSpaces(kinds, ReshardTables(plan.mesh, cluster), fixed=FixedChoices(choices))
    tables = Tables(skeleton, spaces, StoragePricing(spaces, fixed=plan.storage), replica_axes)
    solution = solve(tables.problem())
    if solution.states is None:
        raise PlanError("the plan can't be priced: a parameter is used in layouts that no storage serves")
    priced = PricedTables(tables=tables, states=solution.states, times=training.accumulate)
    seconds_used = PlanPrice.time_of(np.asarray(solution.resources), cluster.overlap, training)
    return PlanPrice(
        made_for=made_for(analysis.graph, cluster, training, replica_axes),
        used=np.asarray(solution.resources),
        overlap=cluster.overlap,
        training=training,
        throughput=throughput(analysis, cluster, training, seconds_used, devices=plan.size),
        sent=totals(priced.messages()),
        ops=priced.ops(),
        edges=priced.edges(),
        axes=axis_uses(analysis, plan.mesh, cluster, choices),
        stored=stored_bytes([(tables, solution.states, None)]),
        memory=memory or tables.peak(choices, plan.storage, recompute),
        limit=training.room(cluster.memory) if limit is None else limit,
        priced=priced,
    )


def made_for(
    graph: Graph, cluster: Cluster, training: TrainingSetup, replica_axes: tuple[str, ...] = ()
) -> dict[str, Any]:
    """The conditions that a prediction is for, for a plan file."""
    return {
        "cluster": str(cluster),
        "batch": graph.batch,
        "optimizer": training.optimizer,
        "compute": training.compute,
        "reduce": training.reduce,
        "masters": training.masters,
        "matmul": training.matmul,
        "precision": training.precision_name,
        "accumulate": training.accumulate,
        "replica_axes": list(replica_axes),
        "outputs": _outputs(graph),
    }


def _outputs(graph: Graph) -> str:
    """What leaves the model."""
    large = any(output.value is not None and graph.values[output.value].shape for output in graph.outputs)
    return "all" if large else "scalars"


def short(value: float) -> float:
    """A number of a plan file: four digits."""
    return float(f"{value:.4g}")

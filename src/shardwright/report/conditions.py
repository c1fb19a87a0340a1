"""What a plan was made for, so that questions about it are answered on the same terms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..errors import ClusterError, PlanError
from ..ir import Graph
from ..plan import Plan
from ..plan.file import read
from ..planning import cluster_for, only_scalars


@dataclass(frozen=True, kw_only=True)
class PlanConditions:
    """The cluster, the training, the axes of which every group passes its own rows, and the memory of a device."""

    cluster: Cluster
    training: TrainingSetup
    rows: tuple[str, ...] = ()
    limit: float | None = None


def made_for(
    plan: Plan, entry: str, cluster: Cluster | str | Path | None, training: TrainingSetup | None
) -> PlanConditions:
    """What the plan file says; a cluster or a training that is given takes its place."""
    predicted = plan.predicted.get(entry)
    known = predicted["for"]["cluster"] if predicted is not None else plan.cluster
    named = known if cluster is None else cluster
    if not named:
        raise PlanError("the plan does not say for which cluster it is; pass cluster='8xA100-80GB', or a cluster file")
    try:
        on_cluster = named if isinstance(named, Cluster) else cluster_for(named, plan.size)
    except ClusterError as error:
        if cluster is not None:
            raise
        raise PlanError(
            f"the plan is for {known!r}, which is no cluster by name ({error}); pass its file as cluster="
        ) from error
    if predicted is None:
        return PlanConditions(cluster=on_cluster, training=training or TrainingSetup())
    conditions = predicted["for"]
    known_training = TrainingSetup(
        optimizer=conditions["optimizer"],
        compute=conditions["compute"],
        reduce=conditions["reduce"],
        accumulate=conditions["accumulate"],
        masters=conditions.get("masters", False),
        precision_name=conditions.get("precision", ""),
    )
    limit = predicted["limit"] if cluster is None else None
    return PlanConditions(
        cluster=on_cluster, training=training or known_training, rows=tuple(conditions["rows"]), limit=limit
    )


def spelled_out(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """A plan with the names of the model's ops in place of stars, and the graph with the outputs that it is for."""
    if graph.entry not in plan.entries:
        raise PlanError(f"the plan has no entry {graph.entry!r}; it has {', '.join(plan.entries)}")
    predicted = plan.predicted.get(graph.entry)
    if predicted is not None and predicted["for"]["outputs"] == "scalars":
        graph = only_scalars(graph)
    if plan.as_read:
        return read(plan.to_json(), graph), graph
    plan.check_against(graph)
    return plan, graph

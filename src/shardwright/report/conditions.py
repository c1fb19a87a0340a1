"""What a plan was made for, so that it is explained and compared on the same terms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cluster import Cluster
from ..cost import TrainingSetup
from ..errors import ClusterError, PlanError
from ..ir import Graph
from ..plan import Plan
from ..plan.file import read
from ..planning import cluster_for, only_scalars, with_batch_norm


@dataclass(frozen=True, kw_only=True)
class PlanConditions:
    """The cluster, the training setup, the axes whose groups pass their own samples, and the memory limit."""

    cluster: Cluster
    training: TrainingSetup
    replica_axes: tuple[str, ...] = ()
    limit: float | None = None


def made_for(
    plan: Plan, entry: str, cluster: Cluster | str | Path | None, training: TrainingSetup | None
) -> PlanConditions:
    """Those of the plan file, unless a cluster or a training setup is passed."""
    predicted = plan.predicted.get(entry)
    known = predicted["for"]["cluster"] if predicted is not None else plan.cluster
    named = cluster or (plan.made_for if plan.made_for is not None and plan.made_for.name == known else known)
    if not named:
        raise PlanError("the plan does not name its cluster; pass cluster='8xA100-80GB', or a cluster file")
    try:
        on_cluster = named if isinstance(named, Cluster) else cluster_for(named, plan.size)
    except ClusterError as error:
        if cluster is not None:
            raise
        raise PlanError(
            f"the plan is for {known!r}, which is not a known cluster ({error}); pass its file as cluster="
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
        matmul=conditions.get("matmul"),
        precision_name=conditions.get("precision", ""),
    )
    limit = predicted["limit"] if cluster is None else None
    return PlanConditions(
        cluster=on_cluster,
        training=training or known_training,
        replica_axes=tuple(conditions["replica_axes"]),
        limit=limit,
    )


def spelled_out(plan: Plan, graph: Graph) -> tuple[Plan, Graph]:
    """The plan with stars expanded to the model's ops, and the graph with the outputs of the plan."""
    if graph.entry not in plan.entries:
        raise PlanError(f"the plan has no entry {graph.entry!r}; it has {', '.join(plan.entries)}")
    predicted = plan.predicted.get(graph.entry)
    if predicted is not None and predicted["for"]["outputs"] == "scalars":
        graph = only_scalars(graph)
    graph = with_batch_norm(graph, plan.batch_norm)
    if plan.as_read:
        return read(plan.to_json(), graph), graph
    plan.check_against(graph)
    return plan, graph

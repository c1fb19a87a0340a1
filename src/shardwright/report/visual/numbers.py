"""What a report takes from the plan file alone: the numbers of `sw.explain`'s screen, as data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from ...cluster import Cluster
from ...errors import ClusterError
from ...plan import Plan
from ...planning import cluster_for
from ...schedule import show_devices
from ..explain import MeasuredSteps
from ..pipeline import describe_layers
from ..screen import KINDS, folded_notes, priced_for
from ..text import parts_of_step

Predicted = Mapping[str, Any]

MOST_NODES = 64  # that are drawn
MOST_DEVICES = 1024


def plan_numbers(plan: Plan, entry: str, measured: MeasuredSteps | None = None) -> dict[str, Any]:
    """All that a report shows of a plan without its model."""
    predicted = plan.predicted.get(entry)
    numbers: dict[str, Any] = {
        "name": plan.name, "model": plan.model, "policy": plan.policy or "custom plan", "cluster": plan.cluster,
        "entry": entry, "devices": plan.size, "microbatches": plan.microbatches, "schedule": plan.schedule,
        "stages": len(plan.stages), "ppRanks": len({stage.mesh.devices for stage in plan.stages}),
        "mesh": [{"name": axis.name, "size": axis.size} for axis in plan.mesh.axes],
        "placement": list(_placement(plan)), "notes": list(folded_notes(plan)), "predicted": None,
        "recomputed": [path for stage in plan.entries[entry] for path in stage.folded_recompute()],
        "chunkedLoss": {name: count for stage in plan.entries[entry] for name, count in stage.chunked_loss.items()},
    }  # fmt: skip
    if measured is not None:
        numbers["measured"] = {"seconds": measured.seconds, "count": measured.count}
    if predicted is not None:
        numbers["predicted"] = _predicted(predicted)
        numbers["others"] = list(_others(predicted))
    return dict(_finite(numbers))


def _finite(item: Any) -> Any:
    """Data without infinities, which a plan file may have for a bound and JSON does not."""
    if isinstance(item, Mapping):
        return {key: _finite(value) for key, value in item.items()}
    if isinstance(item, list | tuple):
        return [_finite(value) for value in item]
    return None if isinstance(item, float) and not math.isfinite(item) else item


def _predicted(predicted: Predicted) -> dict[str, Any]:
    pipeline = predicted.get("pipeline", {})
    return {
        "for": priced_for(predicted), "seconds": predicted["seconds"], "bound": predicted.get("bound"),
        "gap": predicted.get("gap"), "stopped": bool(predicted.get("stopped")),
        "bubble": pipeline.get("bubble") if len(pipeline.get("stages", ())) > 1 else None,
        "balance": pipeline.get("balance"), "throughput": predicted.get("throughput"),
        "parts": [{"name": name, "seconds": seconds} for name, seconds in parts_of_step(predicted).items()],
        "memory": {kind: predicted["memory"][kind] for kind in ("peak", *KINDS)},
        "limit": predicted["limit"], "at": dict(predicted["at"]), "axes": list(predicted.get("axes", ())),
        "stored": dict(predicted["stored"]), "sent": list(predicted.get("sent", ())),
        "ops": list(predicted.get("ops", ())), "edges": list(predicted.get("edges", ())),
        "links": list(pipeline.get("links", ())),
        "stages": [{**stage, "layers": describe_layers(stage["layers"])} for stage in pipeline.get("stages", ())],
        "tried": pipeline.get("tried"), "pruned": pipeline.get("pruned"),
    }  # fmt: skip


def _others(predicted: Predicted) -> Iterator[dict[str, Any]]:
    """The plans that lost, with their time or a bound of it."""
    for mesh in predicted.get("meshes", ()):
        if mesh["outcome"] != "chosen":
            times = {"seconds": mesh["seconds"], "bound": mesh["bound"], "memory": mesh.get("memory")}
            yield {"kind": "mesh", "text": f"mesh {mesh['mesh']}", "outcome": mesh["outcome"], **times}
    pipeline, searched = predicted.get("pipeline", {}), predicted.get("pipelines")
    if searched is not None and searched["best"] is not None:
        yield {"kind": "pipeline", "outcome": "slower", **searched["best"]}
    if pipeline.get("flat") is not None:
        flat = pipeline["flat"]
        text = f"without a pipeline, mesh {flat['mesh']}"
        yield {"kind": "mesh", "text": text, "outcome": "slower", "seconds": flat["seconds"]}
    for other in pipeline.get("others", ()):
        yield {"kind": "pipeline", "outcome": "slower", **other}


def _placement(plan: Plan) -> Iterator[dict[str, Any]]:
    """The meshes of stages, those on the same devices once."""
    meshes: dict[tuple[int, ...], list[int]] = {}
    for number, stage in enumerate(plan.stages):
        meshes.setdefault(stage.mesh.devices, []).append(number)
    for devices, stages in meshes.items():
        mesh = plan.stages[stages[0]].mesh
        yield {
            "stages": stages, "mesh": [{"name": axis.name, "size": axis.size} for axis in mesh.axes],
            "devices": show_devices(devices),
            "order": list(devices) if list(devices) != sorted(devices) else None,
        }  # fmt: skip


def nodes_of(plan: Plan) -> dict[str, Any] | None:
    """The nodes that the devices of a plan lie on, and the links between them; None if the cluster is not known."""
    cluster = _cluster(plan)
    if cluster is None:
        return None
    nodes: dict[tuple[int, int], list[int]] = {}
    for rank in range(min(plan.size, cluster.size)):
        nodes.setdefault(cluster.node_of(rank), []).append(rank)
    shown: list[dict[str, Any]] = []
    count = 0
    for (group, _), ranks in nodes.items():
        node = cluster.groups[group].node
        count += len(ranks)
        if len(shown) == MOST_NODES or (shown and count > MOST_DEVICES):
            break
        shown.append({
            "device": node.device.name, "inside": node.inside.name, "network": node.network.name,
            "first": ranks[0], "count": len(ranks),
        })  # fmt: skip
    return {"name": str(cluster), "count": len(nodes), "nodes": shown}


def _cluster(plan: Plan) -> Cluster | None:
    if plan.made_for is not None and plan.made_for.name == plan.cluster:
        return plan.made_for
    try:
        return cluster_for(plan.cluster, plan.size) if plan.cluster else None
    except ClusterError:  # it was a file, which is not here
        return None

"""From a wish to a plan: a plan string, a file, a Plan, a function, or "auto", which searches.

What the search has to know is a `Setting`: the cluster, how the model is trained, the memory, what people ask for.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from .capture import without_collection
from .cluster import Cluster, Node, NodeGroup, find
from .cluster.catalogue import USUAL, inside, matching, usual_network
from .cost import STATES, TrainingSetup
from .errors import PlanError
from .ir import Graph, Output
from .ir.recompute import faults_of
from .plan import Plan, PolicyRequest, build_plan, parse_plan_string
from .plan.auto import Progress, SearchOptions, SearchResult, extend
from .plan.file import load as load_plan
from .plan.joint import JointResult, note_of, pipeline_summary, predicted
from .plan.joint import find_plan as find_joint
from .plan.pipeline import build_pipeline, continue_pipeline
from .plan.price import price
from .precision import Precision, name_of
from .rules import Analysis
from .rules.replica_axes import is_replica, replica_axes
from .runtime.world import World

PlanLike = str | Path | Plan | Callable[[Graph, int], Plan]


@dataclass(frozen=True, kw_only=True)
class PlanningTask:
    """What a plan is made for. `rows`: every data-parallel group passes its own rows."""

    cluster: Cluster
    training: TrainingSetup = field(default_factory=TrainingSetup)
    options: SearchOptions = field(default_factory=SearchOptions)
    rows: bool = False
    progress: Progress | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How a batch is cut into microbatches: their number, if somebody says, and whether each is a batch of its own."""

    microbatches: int | None = None
    local: bool = False


def make_plan(
    graph: Graph,
    analysis: Analysis,
    wish: PlanLike,
    world: int,
    setting: PlanningTask | None = None,
    batching: Batching | None = None,
) -> Plan:
    """The plan that was asked for, for a graph on `world` devices. With a setting it says what it costs."""
    requested = batching or Batching()
    if isinstance(wish, Plan):
        plan = wish
    elif isinstance(wish, Path) or (isinstance(wish, str) and wish.endswith(".json")):
        plan = load_plan(wish, graph)
    elif wish == "auto":
        task = setting or PlanningTask(cluster=cluster_of(world))
        options = replace(task.options, microbatches=requested.microbatches, local=requested.local)
        return find_plan(analysis, world, replace(task, options=options)).plan
    elif isinstance(wish, str):
        plan = _drawn(
            graph, analysis, parse_plan_string(wish, world), requested, str(setting.cluster) if setting else ""
        )
    else:
        plan = wish(graph, world)
    if not (isinstance(wish, str) and not wish.endswith(".json")):
        _check_batching(plan, requested)
    if plan.size != world:
        raise PlanError(f"the plan is for {plan.size} devices ({plan.mesh}), and there are {world} processes")
    plan.check_against(graph)
    if setting is None:
        return plan
    plan = replace(plan, made_for=setting.cluster)
    return plan if plan.is_pipeline else priced(plan, analysis, setting)


def _check_batching(plan: Plan, requested: Batching) -> None:
    """Refuse a plan that says other microbatches than were asked for."""
    if requested.microbatches not in (None, plan.microbatches):
        raise PlanError(
            f"the plan has {plan.microbatches} microbatches, and {requested.microbatches} are asked for; "
            "leave that to it"
        )
    if plan.local != requested.local:
        how, other = ("local", "global") if plan.local else ("global", "local")
        raise PlanError(
            f'the plan is for microbatch_semantics="{how}" with microbatches={plan.microbatches}, and "{other}" is '
            "asked for; ask for what the plan is for, or make another"
        )


def _drawn(graph: Graph, analysis: Analysis, request: PolicyRequest, requested: Batching, cluster: str) -> Plan:
    """What a plan string asks for."""
    if request.stages or (requested.microbatches or 1) > 1:
        return build_pipeline(graph, request, analysis, cluster, requested.microbatches, requested.local)
    return build_plan(graph, request, analysis, cluster)


def find_plan(analysis: Analysis, world: int, setting: PlanningTask) -> JointResult:
    """Search for the best plan, flat or a pipeline, and say in it what it costs."""
    if setting.cluster.size < world:
        raise PlanError(f"the cluster {setting.cluster} has {setting.cluster.size} devices, and {world} are asked for")
    options = replace(setting.options, data_only=setting.rows)
    strange = [name for name in options.constraints.axes if setting.rows and not is_replica(name)]
    if strange:
        raise PlanError(
            f'with inputs="per_replica" every axis splits the batch and is called dp, not {", ".join(strange)}'
        )
    with without_collection():
        result = find_joint(analysis, setting.cluster, setting.training, options, size=world, progress=setting.progress)
        return replace(result, plan=replace(_told(result, analysis, setting), made_for=setting.cluster))


def _told(result: JointResult, analysis: Analysis, setting: PlanningTask) -> Plan:
    """The plan that was named_cluster, with what it costs, and how it compares with plans of the other kind."""
    entry, note = analysis.graph.entry, note_of(result)
    if result.pipeline is not None:
        prediction = predicted(result, setting.cluster, setting.training, analysis.graph)
        plan = replace(result.plan, predicted={**result.plan.predicted, entry: prediction})
    else:
        plan = priced(result.plan, analysis, setting, result.flat)
        plan = replace(plan, predicted={**plan.predicted, entry: {**plan.predicted[entry], **pipeline_summary(result)}})
    return replace(plan, notes=(*plan.notes, f"the search: {note}")) if note else plan


def priced(plan: Plan, analysis: Analysis, setting: PlanningTask, result: SearchResult | None = None) -> Plan:
    """A plan with what it is predicted to cost."""
    entry = analysis.graph.entry
    rows = replica_axes(plan.mesh) if setting.rows else ()
    limit = setting.options.memory
    memory = result.best.memory if result is not None else None
    prediction = price(
        analysis, setting.cluster, setting.training, plan, rows=rows, limit=limit, memory=memory
    ).as_json()
    if result is not None:
        prediction |= result.as_json()
    return replace(plan, predicted={**plan.predicted, entry: prediction})


def continue_plan(
    plan: Plan, graph: Graph, analysis: Analysis, world: int, setting: PlanningTask | None = None
) -> Plan:
    """A plan with one more entry (eval, another batch size): parameters stay as they are held."""
    if plan.is_pipeline:
        return continue_pipeline(plan, analysis)
    if plan.policy == "auto":
        cluster = setting.cluster if setting else cluster_of(world)
        more = extend(plan, analysis, cluster, setting.training if setting else TrainingSetup())
    else:
        more = build_plan(
            graph, parse_plan_string(plan.policy, world).like(plan.mesh), analysis, plan.cluster, lenient=True
        )
    wished = next(iter(plan.entries.values()))[0].recompute
    again = tuple(path for path in wished if not faults_of(graph, path))
    return replace(
        plan,
        entries={**plan.entries, graph.entry: (replace(more.entries[graph.entry][0], recompute=again),)},
        fingerprints={**plan.fingerprints, **more.fingerprints},
        notes=tuple(dict.fromkeys((*plan.notes, *more.notes))),
    )


def cluster_of(size: int) -> Cluster:
    """So many processes on this machine, as far as the catalogue knows it."""
    return find("cpu" if size == 1 else f"cpu:{size}") if not torch.cuda.is_available() else _gpus(size, size)


def cluster_for(cluster: str | Path | int, size: int) -> Cluster:
    """The cluster that somebody named; a single device that a plan is for several of is so many of them."""
    if isinstance(cluster, int):
        return find(f"cpu:{size}")
    named_cluster = find(cluster)
    if named_cluster.size == 1 and size > 1:
        (group,) = named_cluster.groups
        return replace(named_cluster, groups=(replace(group, node=replace(group.node, devices=size)),))
    if named_cluster.size < size:
        raise PlanError(f"the cluster {named_cluster} has {named_cluster.size} devices, and {size} are asked for")
    return named_cluster


def cluster_here(world: World) -> Cluster:
    """The cluster that the running processes are on: its device by name, the usual links, nodes as torchrun says."""
    local = int(os.environ.get("LOCAL_WORLD_SIZE", world.size))
    if world.device.type != "cuda":
        return cluster_of(world.size)
    return _gpus(world.size, local if world.size % local == 0 else world.size)


def _gpus(size: int, local: int) -> Cluster:
    device = matching(torch.cuda.get_device_name(), torch.cuda.get_device_properties(0).total_memory)
    if device is None:
        raise PlanError(
            f"{torch.cuda.get_device_name()} is not in the catalogue, so that the search does not know how fast it is; "
            "run shardwright calibrate -o cluster.yaml and pass cluster='cluster.yaml', or name a plan"
        )
    node = Node(
        device=device,
        devices=local,
        inside=inside(USUAL[device.name].inside),
        network=usual_network(device.name, local),
    )
    return Cluster(name=f"{size // local}x{local}x{device.name}", groups=(NodeGroup(node=node, nodes=size // local),))


def training_of(
    optimizer: torch.optim.Optimizer | str | None, accumulate: int = 1, precision: Precision | None = None
) -> TrainingSetup:
    """How a model is trained, from its optimizer; AdamW if there is none, or one whose state is not known.

    What a precision casts is in the graph; the rest of it is said here.
    """
    if isinstance(optimizer, str):
        name = optimizer
    else:
        name = "adamw" if optimizer is None else type(optimizer).__name__.lower()
        if optimizer is not None and name == "sgd" and any(group.get("momentum") for group in optimizer.param_groups):
            name = "momentum"
        name = name if name in STATES else "adamw"
    exact = precision or Precision()
    return TrainingSetup(
        optimizer=name, accumulate=accumulate, reduce=exact.sync, masters=exact.master, precision_name=name_of(exact)
    )


def only_scalars(graph: Graph) -> Graph:
    """A graph that gives back its numbers (the loss) and nothing else: what has rows stays where it is.

    It is still the same model, with the same fingerprint: plans for one are plans for the other.
    """

    def kept(output: Output) -> Output:
        large = output.value is not None and graph.values[output.value].shape
        return replace(output, value=None, literal=None) if large else output

    returned = graph.outputs if graph.returned is None else graph.returned
    return replace(graph, outputs=tuple(kept(output) for output in graph.outputs), returned=returned)


__all__ = ["PlanLike", "PlanningTask", "SearchResult", "continue_plan", "find_plan", "make_plan", "only_scalars"]

"""From a `PlanRequest` to a plan: by policies, from a file, by a function, or by the search."""

from __future__ import annotations

import math
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from .capture import without_collection
from .cluster import Cluster, Device, find
from .cluster.catalogue import matching
from .cost import STATES, TrainingSetup
from .errors import PlanError, ShardwrightError
from .ir import Graph, Output
from .ir.recompute import faults_of
from .plan import Plan, PlanBuilder, PlanStage, PolicyRequest, build_plan, parse_plan_string
from .plan.auto import SearchResult, extend
from .plan.binder import bind
from .plan.by_hand import decide
from .plan.chunking import continued_chunks
from .plan.clash import format_bytes
from .plan.constraint_kinds import Constraint
from .plan.digest import ring_notes
from .plan.joint import JointResult, find_best_plan, note_of, pipeline_summary, predicted, price_plan
from .plan.kept import check_kept
from .plan.pipeline import build_pipeline, continue_pipeline, same_choices
from .plan.policy_builder import POLICY, PolicyBuilder
from .plan.policy_call import policy_call
from .plan.price import price
from .plan.request import AutoPlan, PlanRequest, PolicyFunction, source_name
from .plan.search_options import SearchOptions
from .plan.string_constraints import module_constraints
from .precision import Precision, name_of
from .rules import Analysis
from .rules.replica_axes import is_replica, replica_axes
from .runtime import accelerator
from .runtime.world import World, ranks_per_node
from .schedule import schedule_kind


def make_plan(graph: Graph, analysis: Analysis, request: PlanRequest, size: int) -> Plan:
    """The requested plan for a graph on `size` devices. With a cluster in the request it has a prediction."""
    plan = _requested_plan(graph, analysis, request, size)
    if isinstance(request.source, AutoPlan | PolicyRequest) and graph.local_statistics:
        plan = replace(plan, batch_norm="local", notes=(*plan.notes, LOCAL_STATISTICS))
    check_batch_norm(plan, graph)
    return plan


LOCAL_STATISTICS = (
    "batch norms in training take the statistics of each rank's own samples, as with DDP, and buffers those of the "
    "first rank (batch_norm='local'): results are not those of one device"
)


def check_batch_norm(plan: Plan, graph: Graph) -> None:
    """Refuse a plan for other statistics of batch norms than were asked for, and local ones in microbatches."""
    wanted = "local" if graph.local_statistics else "global"
    if plan.batch_norm != wanted:
        raise PlanError(
            f'the plan is for CompileOptions(batch_norm="{plan.batch_norm}"), and "{wanted}" is asked for; ask for '
            "what the plan is for, or make another (verify and rehearse compare with one device: they take global ones)"
        )
    if plan.is_pipeline and graph.local_statistics:
        raise PlanError(
            'CompileOptions(batch_norm="local") is for plans without microbatches; leave it out: with '
            'PipelineOptions(semantics="local") '
            "each microbatch is a batch of its own"
        )


def with_batch_norm(graph: Graph, batch_norm: str) -> Graph:
    """A graph whose batch norms in training take the statistics of the global batch, or of a rank's own samples."""
    branches = {name: with_batch_norm(branch, batch_norm) for name, branch in graph.branches.items()}
    return replace(graph, local_statistics=batch_norm == "local", branches=branches)


def _requested_plan(graph: Graph, analysis: Analysis, request: PlanRequest, size: int) -> Plan:
    source = request.source
    if isinstance(source, AutoPlan):
        return find_plan(analysis, _with_constraints(request, source.constraints()), size).plan
    if isinstance(source, PolicyRequest):
        request = _with_constraints(request, tuple(module_constraints(source)))
        source.check_size(size)
        plan = _by_policies(graph, analysis, source, request)
    else:
        if isinstance(source, Plan):
            plan = source
        elif callable(source):
            written = call_policy(source, analysis, request.cluster or cluster_of(size))
            if isinstance(written, PolicyBuilder):
                decided = written.constraints().items
                return find_plan(analysis, _with_constraints(request, decided), size).plan
            plan = written
        else:
            plan = source.load(graph)
        _check_microbatches(plan, request.options)
    if plan.size != size:
        raise PlanError(f"the plan is for {plan.size} devices ({plan.mesh}), and there are {size} processes")
    plan.check_against(graph)
    constraints = request.options.constraints
    limits = bind(constraints, analysis)
    if constraints.items:
        check_kept(plan, analysis, limits, request.cluster)
    if request.cluster is None:
        if limits.memory < math.inf:
            raise PlanError("a memory limit needs a cluster, on which the plan is priced; pass cluster=")
        return plan
    plan = priced(replace(plan, made_for=request.cluster), analysis, request, request.cluster)
    peak = plan.predicted[graph.entry]["memory"]["peak"]
    if peak > limits.memory:
        raise PlanError(
            f"the plan needs {format_bytes(peak)} on a device, and a constraint allows {format_bytes(limits.memory)}"
        )
    return plan


def _with_constraints(request: PlanRequest, items: tuple[Constraint, ...]) -> PlanRequest:
    """The request with more constraints."""
    constraints = request.options.constraints
    more = replace(constraints, items=(*constraints.items, *items))
    return replace(request, options=replace(request.options, constraints=more))


def call_policy(policy: PolicyFunction, analysis: Analysis, cluster: Cluster) -> Plan | PolicyBuilder:
    """What a policy writes for a graph; an error in it becomes one of ours, which names its line."""
    name = source_name(policy)
    try:
        with policy_call(analysis):
            written = policy(analysis.graph, cluster)
    except ShardwrightError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if not Path(frame.filename).is_relative_to(Path(__file__).parent)]
        last = (own or frames)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}"
        raise PlanError(f"the policy {name} failed at {where}: {type(error).__name__}: {error}") from error
    if not isinstance(written, Plan | PolicyBuilder):
        raise PlanError(
            f"the policy {name} returned a {type(written).__name__}; return builder.build(), or the builder, for a "
            "search for what is left open"
        )
    if isinstance(written, Plan) and written.policy in ("", POLICY):
        return replace(written, policy=f"policy {name}")
    return written


def _check_microbatches(plan: Plan, options: SearchOptions) -> None:
    """Refuse an existing plan for other microbatches than were asked for."""
    if options.microbatches not in (None, plan.microbatches):
        raise PlanError(
            f"the plan has {plan.microbatches} microbatches, and {options.microbatches} are asked for; leave that to it"
        )
    if plan.local != options.local:
        how, other = ("local", "global") if plan.local else ("global", "local")
        raise PlanError(
            f'the plan is for PipelineOptions(semantics="{how}", microbatches={plan.microbatches}), and "{other}" is '
            "asked for; ask for what the plan is for, or make another"
        )


def _by_policies(graph: Graph, analysis: Analysis, policies: PolicyRequest, request: PlanRequest) -> Plan:
    options, cluster = request.options, str(request.cluster or "")
    limits = bind(options.constraints, analysis)
    wanted = limits.count("microbatches")
    count = options.microbatches or (wanted.exact if wanted is not None else None)
    if policies.schedule is None and policies.stages and limits.schedule is not None:
        policies = replace(policies, schedule=schedule_kind(limits.schedule))
    if policies.stages or (count or 1) > 1:
        plan = build_pipeline(graph, policies, analysis, cluster, count, options.local, limits)
    else:
        plan = build_plan(
            graph, policies, analysis, cluster, afterwards=lambda builder: decide(builder, limits)
        )
    return replace(plan, policy=f"{policies} with constraints") if options.constraints.items else plan


def find_plan(analysis: Analysis, request: PlanRequest, size: int) -> JointResult:
    """Search for the best plan, flat or a pipeline, and predict what it costs."""
    cluster, options = request.cluster or cluster_of(size), request.options
    if cluster.size < size:
        raise PlanError(f"the cluster {cluster} has {cluster.size} devices, and {size} are asked for")
    strange = [name for name in options.constraints.axes if options.data_only and not is_replica(name)]
    if strange:
        raise PlanError(
            f'with inputs="per_replica" every axis splits the batch and is called dp, not {", ".join(strange)}'
        )
    with without_collection():
        result = find_best_plan(analysis, cluster, request.training, options, size=size)
        plan = _with_predictions(result, analysis, request, cluster)
        return replace(result, plan=replace(plan, made_for=cluster))


def _with_predictions(result: JointResult, analysis: Analysis, request: PlanRequest, cluster: Cluster) -> Plan:
    """The plan of a search with what it costs, and how it compares with plans of the other kind."""
    entry, note = analysis.graph.entry, note_of(result)
    if result.pipeline is not None:
        prediction = predicted(result, cluster, request.training, analysis)
        plan = replace(result.plan, predicted={**result.plan.predicted, entry: prediction})
    else:
        plan = priced(result.plan, analysis, request, cluster, result.flat)
        plan = replace(plan, predicted={**plan.predicted, entry: {**plan.predicted[entry], **pipeline_summary(result)}})
    return replace(plan, notes=(*plan.notes, f"the search: {note}")) if note else plan


def priced(
    plan: Plan, analysis: Analysis, request: PlanRequest, cluster: Cluster, result: SearchResult | None = None
) -> Plan:
    """A plan with what it is predicted to cost."""
    entry, options = analysis.graph.entry, request.options
    samples_over = replica_axes(plan.mesh) if options.data_only else ()
    if result is None:
        prediction = price_plan(
            analysis, cluster, request.training, plan, replica_axes=samples_over, limit=options.memory
        ).as_json()
    else:
        prediction = price(
            analysis, cluster, request.training, plan, replica_axes=samples_over, limit=options.memory,
            memory=result.best.memory,
        ).as_json() | result.as_json()  # fmt: skip
    rings = ring_notes(analysis, plan.mesh, plan.choices(entry), cluster)
    notes = tuple(dict.fromkeys((*plan.notes, *rings)))
    return replace(plan, predicted={**plan.predicted, entry: prediction}, notes=notes)


def continue_plan(plan: Plan, graph: Graph, analysis: Analysis, request: PlanRequest) -> Plan:
    """A plan with one more entry (eval, another batch size): parameters stay as they are stored."""
    if plan.is_pipeline:
        return continue_pipeline(plan, analysis)
    if plan.policy == "auto":
        more = extend(plan, analysis, request.cluster or cluster_of(plan.size), request.training)
    elif " " in plan.policy or not plan.policy:  # a policy, or a plan string with constraints
        stage = PlanStage(mesh=plan.mesh, choices=same_choices(plan, analysis, plan.mesh))
        more = PlanBuilder(graph, plan.mesh, analysis).finish("", settle=False)
        more = replace(more, entries={graph.entry: (stage,)})
    else:
        policies = parse_plan_string(plan.policy)
        policies.check_size(plan.size)
        more = build_plan(graph, policies.like(plan.mesh), analysis, plan.cluster, lenient=True)
    recomputed = next(iter(plan.entries.values()))[0].recompute
    again = tuple(path for path in recomputed if not faults_of(graph, path))
    chunked, notes = continued_chunks(plan, graph)
    stage = replace(more.entries[graph.entry][0], recompute=again, chunked_loss=chunked)
    return replace(
        plan,
        entries={**plan.entries, graph.entry: (stage,)},
        fingerprints={**plan.fingerprints, **more.fingerprints},
        notes=tuple(dict.fromkeys((*plan.notes, *more.notes, *notes))),
    )


def cluster_of(size: int) -> Cluster:
    """So many processes on this machine, as far as the catalogue knows it."""
    return _accelerators(size, size) if accelerator.is_available() else _cpus(size, size)


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
    make = _cpus if world.device.type == "cpu" else _accelerators
    return make(world.size, ranks_per_node(world.size))


def in_catalogue(world: World) -> bool:
    """Whether the catalogue knows the device of this rank: a GPU by its name; of a CPU it has only a guess."""
    return world.device.type != "cpu" and _known(world.device) is not None


def _cpus(size: int, local: int) -> Cluster:
    alone = "cpu" if size == 1 else f"cpu:{size}"
    return find(alone if local == size else f"{size // local}x{local}xcpu")


def _accelerators(size: int, local: int) -> Cluster:
    own = accelerator.device_of(0)
    known = _known(own)
    if known is None:
        raise PlanError(
            f"{accelerator.name_of(own)} is not in the catalogue, so that the search does not know how fast it is; "
            "run shardwright calibrate -o cluster.yaml and pass cluster='cluster.yaml', or name a plan"
        )
    return find(f"{size // local}x{local}x{known.name}")


def _known(own: torch.device) -> Device | None:
    return matching(accelerator.name_of(own), accelerator.memory_of(own))


def training_of(
    optimizer: torch.optim.Optimizer | str | None, accumulate: int = 1, precision: Precision | None = None
) -> TrainingSetup:
    """How a model is trained, from its optimizer; AdamW if there is none, or one whose state is not known.

    What a precision casts is in the graph; the rest of it is set here.
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
        optimizer=name, accumulate=accumulate, reduce=exact.sync, masters=exact.master, matmul=exact.matmul,
        precision_name=name_of(exact),
    )  # fmt: skip


def only_scalars(graph: Graph) -> Graph:
    """A graph that gives back its numbers (the loss) and nothing else: what has rows stays where it is.

    It is still the same model, with the same fingerprint: plans for one are plans for the other.
    """

    def kept(output: Output) -> Output:
        large = output.value is not None and graph.values[output.value].shape
        return replace(output, value=None, literal=None) if large else output

    returned = graph.outputs if graph.returned is None else graph.returned
    return replace(graph, outputs=tuple(kept(output) for output in graph.outputs), returned=returned)

"""The public story: one line in a training script.

    model, optimizer = parallelize(model, optimizer)

capture -> graph -> rules -> plan -> lower -> emit -> runtime. Each step is one package; `compile/` walks them for a
call, this file is the door: here what people pass becomes a `PlanRequest` and `CompilerSettings`, once.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .calibrate import measured_cluster
from .capture import CapturedGraph, MaskFacts, capture, cast, casting, find_opaque
from .cluster import Cluster, quantity
from .cluster import find as find_cluster
from .compile import Compiler, CompilerSettings, copy_to_meta, with_unbatched
from .compiled_parts import replace_parts
from .cost import TrainingSetup
from .errors import InputError
from .options import (
    GENERATED,
    MOVED,
    CompileOptions,
    Opaque,
    PipelineOptions,
    expect_only,
    read_options,
    refuse_moved,
)
from .plan import Plan
from .plan.constraint_kinds import Constraints, ConstraintsLike
from .plan.constraints import read_constraints
from .plan.request import AutoPlan, PlanFile, PlanLike, PlanRequest, PlanSource, read_source, source_size
from .plan.search_options import Progress, SearchOptions
from .planning import (
    cluster_for,
    cluster_here,
    in_catalogue,
    make_plan,
    only_scalars,
    training_of,
    with_batch_norm,
)
from .precision import Precision, PrecisionLike, read_precision
from .probe import probing
from .rules import analyse
from .runtime.faults import watch
from .runtime.model.inputs import Mode
from .runtime.model.parallel_model import ParallelModel
from .runtime.model.reduction import LossReduction
from .runtime.model.wrappers import refuse_prepare
from .runtime.optimizer.adopt import Optimizers, several
from .runtime.world import World, calibrates, start
from .wrapping import check_optimizers, unwrapped


@refuse_moved("sw.parallelize", MOVED)
def parallelize(
    model: nn.Module, optimizer: Optimizers = None, *, example: Any = None, plan: PlanLike = "auto",
    cluster: str | Path = "auto", memory: str | float | None = None, constraints: ConstraintsLike | None = None,
    precision: PrecisionLike = None, inputs: Mode = "global", accumulate: int = 1, reduction: LossReduction = "mean",
    seed: int = 0, pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    compile: CompileOptions | Mapping[str, Any] | None = None,
) -> Any:  # fmt: skip
    """Compile a model for all processes of this run.

    example     arguments of a call: a tuple, a dict of keyword arguments, or (args, kwargs). Without
                it the model is compiled at its first call.
    plan        "auto", a plan string such as "dp=2,tp=2" or the same as a dict, both ("auto,tp=2"), a Plan, the path
                of a plan file, or a policy: a function of a graph and a cluster, or its name ("mine.py:policy").
    cluster     what "auto" plans for: the name of a cluster ("8xA100-80GB"), the path of a cluster file (written by
                shardwright calibrate), "auto": the devices of this run, measured once (see docs/clusters.md), or
                "catalogue": as the catalogue knows them.
    memory      how much of a device's memory a plan may use, such as "70GiB".
    constraints what the plan has to keep to: a list of dicts or the path of a YAML file, see docs/constraints.md.
    precision   "fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp16", or in full, see docs/precision.md; None: as it is.
    inputs      what a call passes: "global" (every rank the whole global batch), "per_replica" (each data-parallel
                replica its own samples), "per_rank" (each rank its own samples).
    accumulate  sync gradients at every n-th backward only.
    reduction   with inputs="per_replica" and a loss outside of the model: "mean" or "sum" over replicas, or "token",
                the mean over all labels that count, see docs/precision.md.
    seed        of what the model draws, such as dropout.
    pipeline    PipelineOptions: the number of microbatches, their semantics, and when backward runs.
    compile     CompileOptions: which outputs and submodules are compiled, which inputs have no batch dim, where
                generated code is written, how long ranks wait for each other.

    Returns the model, or the model and the optimizer (or the list of all that train it), now working on the shards.
    With compile=CompileOptions(parts=...) it is the same model, with compiled submodules.
    """
    _check(inputs, accumulate, reduction)
    pipeline, options = read_options(PipelineOptions, pipeline), read_options(CompileOptions, compile)
    exact, source = _exact(precision, model, optimizer), read_source(plan)
    model = unwrapped(model)
    world, requested = start(timeout=options.timeout), read_asked(constraints, model, source)
    check_optimizers(model, several(optimizer), per_replica=inputs == "per_replica" and world.size > 1)
    refuse_prepare(several(optimizer))
    search = SearchOptions(
        memory=read_bytes(memory), constraints=requested, microbatches=pipeline.microbatches, local=pipeline.local,
        data_only=inputs == "per_replica",
    )  # fmt: skip
    request = PlanRequest(source=source, options=search)
    if cluster != "auto" or (request.searches and options.parts is None):
        training = training_of(next(iter(several(optimizer)), None), accumulate, exact)
        request = replace(request, cluster=cluster_of_run(cluster, world), training=training)
    settings = CompilerSettings(
        request=request, inputs=inputs, outputs=options.outputs or "all", unbatched=options.unbatched,
        opaque=options.opaque, batch_norm=options.batch_norm, precision=exact, backward=pipeline.backward,
        accumulate=accumulate, reduction=reduction, seed=seed, directory=Path(options.directory or GENERATED),
        cache_size=options.cache_size,
    )  # fmt: skip
    if options.parts is not None:
        _check_parts(example, constraints, exact.casts, options, pipeline)
        replace_parts(model, optimizer, world, settings, options.parts)
        return model if optimizer is None else (model, optimizer)
    compiled = _make_model(model, Compiler(model, optimizer, world, settings), example)
    return compiled if optimizer is None else (compiled, optimizer)


def cluster_of_run(cluster: str | Path, world: World) -> Cluster:
    """The cluster that a run is planned for. All ranks must call it: the first "auto" on a machine measures it."""
    if cluster not in ("auto", "catalogue"):
        return find_cluster(cluster)
    measures = cluster == "auto" and calibrates() and not in_catalogue(world)
    return (measured_cluster(world) if measures else None) or cluster_here(world)


def _make_model(model: nn.Module, compiler: Compiler, example: Any) -> ParallelModel:
    settings = compiler.settings
    check_names(model, compiler.call_inputs.unbatched)
    compiled = ParallelModel(compiler, settings.accumulate, settings.reduction)
    with watch.calling():
        compiler.agree()
    if example is not None:
        compiled.prepare(*arguments_of(example))
    else:
        compiled.show(model)
    return compiled


def _exact(precision: PrecisionLike, model: nn.Module, optimizer: Optimizers) -> Precision:
    requested = read_precision(precision)
    requested.check_runs()
    if requested.master and optimizer is None and model.training:
        raise InputError(
            f"precision={precision!r} has float32 masters, which the optimizer updates, and there is none; pass the "
            "optimizer, or call model.eval() before if it is not trained, or say {'base': ..., 'master': False}"
        )
    return requested


def _check(inputs: str, accumulate: int, reduction: str) -> None:
    if inputs not in ("global", "per_replica", "per_rank"):
        raise InputError(f'inputs={inputs!r} is not a mode; use "global", "per_replica" or "per_rank"')
    if reduction != "mean" and inputs != "per_replica":
        raise InputError(
            f'reduction={reduction!r} is for inputs="per_replica", where each replica has a loss of its own '
            f"rows; with inputs={inputs!r} every rank sees the outputs of the whole batch, and its loss is that of all"
        )
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate} makes no sense; use 1 to sync at every backward")


def check_names(model: nn.Module, unbatched: Sequence[str] | None) -> None:
    """Refuse a name of an input that a call of the model can't pass: a slip of the pen would be without effect."""
    if unbatched is None:
        return
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD) for parameter in parameters):
        return
    names = [parameter.name for parameter in parameters]
    strange = [name for name in unbatched if re.split(r"[\[.]", name)[0] not in names]
    if strange:
        raise InputError(
            f"CompileOptions(unbatched={list(unbatched)}): {type(model).__name__} has no input {', '.join(strange)}; "
            f"its inputs are {', '.join(names)}"
        )


def _check_parts(
    example: Any, constraints: Any, casts: bool, options: CompileOptions, pipeline: PipelineOptions
) -> None:
    if example is not None:
        raise InputError("parts are compiled at their first call, for what it gives them; leave example out")
    if constraints is not None:
        raise InputError("constraints are for the search over a whole model, not over parts of one; leave them out")
    if options.unbatched is not None:
        raise InputError("unbatched names inputs of a whole model, not of parts of one; leave it out")
    if casts:
        raise InputError("precision is for a whole model; cast the parts, or use torch.autocast in the model")
    kept = ("directory", "opaque", "parts", "cache_size", "timeout")
    expect_only(options, kept, "parts", "a part returns what it returns")
    expect_only(pipeline, (), "parts", "each part is one program")


@refuse_moved("sw.plan", MOVED)
def plan(
    model: nn.Module, *, example: Any, plan: PlanLike = "auto", cluster: str | Path | int = "cpu", entry: str = "train",
    memory: str | float | None = None, constraints: ConstraintsLike | None = None, optimizer: str = "adamw",
    precision: PrecisionLike = None, accumulate: int = 1, inputs: Mode = "global", seconds: float | None = None,
    progress: Progress | None = None, pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    compile: CompileOptions | Mapping[str, Any] | None = None,
) -> Plan:  # fmt: skip
    """The plan for a model, without running anything: no processes, no GPU, and meta parameters are fine.

    cluster     a name such as "8xA100-80GB", the path of a cluster file, or a number of CPU processes
    memory      how much of a device's memory it may use, such as "70GiB"; without it, what the device has
    constraints what the plan has to keep to: a list of dicts or the path of a YAML file, see docs/constraints.md
    optimizer   the kind whose state counts: "adamw", "sgd", "momentum", ...
    precision   as `parallelize` takes it: "bf16-mixed", "bf16", ...; None: as it is written
    seconds     how long "auto" searches at most; the plan says if that was not enough
    progress    is called with what is being looked at, and the best time of a step so far
    pipeline    PipelineOptions: how many microbatches; without it, about four a stage, or what "auto" finds
    compile     CompileOptions: outputs, unbatched, opaque and batch_norm, as `parallelize` takes them

    What the plan is predicted to cost is in its `predicted`; `explain` shows it.
    """
    _check(inputs, accumulate, "mean")
    if cluster in ("auto", "catalogue"):
        raise InputError(
            f"cluster={cluster!r} is the machine of a run, and sw.plan runs nothing; pass a name such as "
            '"8xA100-80GB", the path of a cluster file, or a number of CPU processes'
        )
    model, source = unwrapped(model), read_source(plan)
    count = cluster if isinstance(cluster, int) else cluster_size(cluster, source)
    microbatches, options = read_options(PipelineOptions, pipeline), read_options(CompileOptions, compile)
    expect_only(microbatches, ("microbatches",), "sw.plan", "it plans for the whole batch, and runs nothing")
    expect_only(options, ("outputs", "unbatched", "opaque", "batch_norm"), "sw.plan", "it writes and runs nothing")
    exact = read_precision(precision)
    request = read_request(
        model, source, cluster=cluster_for(cluster, count), training=training_of(optimizer, accumulate, exact),
        memory=memory, constraints=constraints,
        search=SearchOptions(
            seconds=math.inf if seconds is None else seconds, progress=progress, data_only=inputs == "per_replica",
            microbatches=microbatches.microbatches,
        ),
    )  # fmt: skip
    return planned(model, example, request, count, entry=entry, precision=exact, options=options)[0]


def read_request(
    model: nn.Module, source: PlanSource, *, cluster: Any, training: TrainingSetup, memory: str | float | None,
    constraints: ConstraintsLike | None, search: SearchOptions,
) -> PlanRequest:  # fmt: skip
    """The request for a plan of a model; the memory limit and the constraints come as people write them."""
    read = replace(search, memory=read_bytes(memory), constraints=read_asked(constraints, model, source))
    return PlanRequest(source=source, options=read, training=training, cluster=cluster)


def planned(
    model: nn.Module, example: Any, request: PlanRequest, size: int, *, entry: str = "train",
    precision: PrecisionLike = None, options: CompileOptions,
) -> tuple[Plan, CapturedGraph]:  # fmt: skip
    """The plan of a request for `size` devices, and the call that it is for: its outputs and what has a batch dim."""
    check_names(model, options.unbatched)
    captured = captured_graph(model, example, entry=entry, opaque=options.opaque, precision=precision)
    captured = with_unbatched(captured, options.unbatched)
    captured = replace(captured, graph=with_batch_norm(captured.graph, options.batch_norm))
    if options.outputs == "scalars":
        captured = replace(captured, graph=only_scalars(captured.graph))
    analysis = analyse(captured.graph, probing(captured.functions))
    return make_plan(captured.graph, analysis, request, size), captured


def captured_graph(
    model: nn.Module, example: Any, *, entry: str | None = None, opaque: Opaque = "marked",
    precision: PrecisionLike = None,
) -> CapturedGraph:  # fmt: skip
    """What a call of a model computes."""
    exact = read_precision(precision)
    args, kwargs = arguments_of(example)
    model = unwrapped(model)
    skeleton = find_opaque(cast(copy_to_meta(model), exact), opaque)
    entry_name = entry or ("train" if model.training else "eval")
    with casting(skeleton, exact):
        return capture(skeleton, args, kwargs, entry=entry_name, real=lambda: (model, args, kwargs),
                       masks=MaskFacts(buffers=dict(model.named_buffers(remove_duplicate=False))))  # fmt: skip


def read_asked(constraints: ConstraintsLike | None, model: nn.Module, source: PlanSource) -> Constraints:
    """Constraints on a plan for a model."""
    searched = isinstance(source, AutoPlan) and source.within is None
    modules = model.named_modules(remove_duplicate=False)
    classes = {path: type(module).__name__ for path, module in modules}
    return read_constraints(constraints, classes, axes_known=not searched)


def read_bytes(text: str | float | None) -> float | None:
    """Bytes as people write them: "70GiB", or a number."""
    try:
        return None if text is None else quantity.read(text, "bytes")
    except ValueError as error:
        raise InputError(f"memory={text!r}: {error}") from error


def cluster_size(cluster: str | Path, source: PlanSource) -> int:
    """How many devices a name such as "8xA100-80GB" or a cluster file stands for; "cpu" is what the plan says."""
    if isinstance(source, Plan):
        return source.size
    total = find_cluster(cluster).size
    return (source_size(source) or 1) if total == 1 and not isinstance(source, PlanFile) else total


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as (args, kwargs)."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, Mapping):
        return (), dict(example)
    if (
        isinstance(example, Sequence)
        and len(example) == 2
        and isinstance(example[1], dict)
        and isinstance(example[0], tuple)
    ):
        return example[0], example[1]
    if isinstance(example, Sequence):
        return tuple(example), {}
    raise InputError(f"example is a {type(example).__name__}; pass a tuple of arguments, a dict, or (args, kwargs)")

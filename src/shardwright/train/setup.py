"""From a trainer's settings to a compiled model: for the ranks of this run, or for ranks that don't exist here."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy
import torch
import yaml  # type: ignore[import-untyped]
from torch import nn
from torch.optim import Optimizer

from ..cluster import find as find_cluster
from ..compile import count_replicas, write
from ..data import Packing
from ..errors import ClusterError, InputError, PlanError
from ..options import CompileOptions, PipelineOptions, expect_only
from ..parallelize import cluster_size, parallelize, planned, read_request
from ..plan import Plan
from ..plan.request import AutoPlan, PlanRequest, PlanSource, is_policy, read_source
from ..plan.search_options import SearchOptions
from ..planning import cluster_for, cluster_here, training_of
from ..precision import read_precision
from ..verify.parity import ranks_of
from ..verify.program import compile_program
from .batches import arguments, move_to, samples_in
from .groups import grouped
from .meters import Meter, peak_of
from .model_with_loss import with_loss

if TYPE_CHECKING:
    from .trainer import Trainer

SETTINGS = (__package__, PipelineOptions.__module__, Packing.__module__)  # whose dataclasses are settings
LONG = 20  # a longer list is data, not a setting


@dataclass(frozen=True, kw_only=True)
class CompiledTraining:
    """A model and its optimizer as they run.

    rows    of the call they were compiled for, over all ranks
    dtype   of the matmuls
    """

    model: Any
    optimizer: Optimizer
    rows: int
    dtype: str


def module_of(trainer: Trainer) -> nn.Module:
    """The module to compile: the model, with its loss."""
    module = trainer.original
    if module is None:
        raise InputError("this trainer has already compiled its model; create a new one")
    if trainer.loss_function is not None:
        module = with_loss(module, trainer.loss_function, trainer.target)
    elif trainer.target is not None:
        raise InputError(f"target={trainer.target!r} needs loss= too")
    return module.train()


def compile_model(trainer: Trainer) -> CompiledTraining:
    """Compile for the ranks of this run."""
    module, world = module_of(trainer), trainer.world
    optimizer = trainer.make_optimizer(grouped(module, trainer.optimization.parameter_groups))
    dtype = arithmetic(module, trainer.precision)
    source = read_source(trainer.plan)
    shares = count_replicas(source, world.size) if trainer.inputs == "per_replica" else 1  # which pass their samples
    batch = move_to(trainer.source.example(shares), world.device)
    model, optimizer = parallelize(
        module, optimizer, example=arguments(batch), plan=trainer.plan, cluster=trainer.cluster, memory=trainer.memory,
        constraints=trainer.constraints, precision=trainer.precision, inputs=trainer.inputs,
        accumulate=trainer.accumulate, seed=trainer.seed, pipeline=trainer.pipeline,
        compile=replace(trainer.compile_options, directory=trainer.run.generated),
    )  # fmt: skip
    model.sync_by_hand()
    return CompiledTraining(model=model, optimizer=optimizer, rows=samples_in(batch, model) * shares, dtype=dtype)


def needs_ranks(source: PlanSource, cluster: str | Path) -> int | None:
    """The number of devices of a plan; None if the run decides."""
    if not isinstance(source, AutoPlan) and not is_policy(source):
        return ranks_of(source)
    return None if cluster == "auto" else cluster_size(cluster, source)


def compile_without_ranks(trainer: Trainer, devices: int) -> tuple[Plan, tuple[Path, ...]]:
    """Plan and code for this number of devices, without a process for each."""
    pipeline = trainer.pipeline
    for name, value, only_there in (
        ("inputs", trainer.inputs, "per_replica"),
        ("pipeline.semantics", pipeline.semantics, "local"),
    ):
        if value == only_there:
            raise InputError(
                f'{name}="{only_there}" is compiled by the ranks that run; start {devices} processes with torchrun'
            )
    module, source = module_of(trainer), read_source(trainer.plan)
    optimizer = trainer.make_optimizer(grouped(module, trainer.optimization.parameter_groups))
    args, kwargs = arguments(trainer.source.example(1))
    exact = read_precision(trainer.precision)
    exact.check_runs()
    request = read_request(
        module, source, cluster=cluster_for(devices if trainer.cluster == "auto" else trainer.cluster, devices),
        training=training_of(optimizer, trainer.accumulate, exact),
        memory=trainer.memory, constraints=trainer.constraints,
        search=SearchOptions(microbatches=pipeline.microbatches),
    )  # fmt: skip
    options = trainer.compile_options
    plan, captured = planned(module, (args, kwargs), request, devices, precision=exact, options=options)
    compiled = compile_program(module, args, kwargs, PlanRequest(source=plan), devices, captured=captured)
    pairs = zip(compiled.texts, compiled.programs, strict=True)
    return plan, tuple(write(text, trainer.run.generated, program) for text, program in pairs)


def with_usual(options: CompileOptions) -> CompileOptions:
    """What a run compiles with: only numbers leave the model, unless somebody says otherwise."""
    why = "a run has a folder of its own, and trains a whole model"
    expect_only(options, ("outputs", "unbatched", "opaque", "batch_norm", "cache_size", "timeout"), "a Trainer", why)
    return replace(options, outputs=options.outputs or "scalars")


def plan_line(plan: Plan, path: Path | None) -> str:
    """What was planned and where it lies, in a line."""
    entry = next(iter(plan.entries))
    seconds = plan.predicted.get(entry, {}).get("seconds")
    parts = [f"plan: {plan.policy or 'custom'}", f"mesh {plan.mesh}" if plan.mesh.axes else "one device"]
    parts += [f"predicted {seconds:.3g} s/step"] if seconds is not None else []
    return ", ".join(parts) + ("" if path is None else f": {path}")


def meter_of(trainer: Trainer, compiled: CompiledTraining) -> Meter:
    """A meter with the model's flops, and the devices' peak if the catalogue has the device."""
    world, plan = trainer.world, compiled.model.plan
    predicted = next((plan.predicted[entry]["seconds"] for entry in plan.entries if entry in plan.predicted), None)
    if compiled.model.flops is None or not compiled.rows:
        return Meter(predicted=predicted)
    try:
        named = trainer.cluster not in ("auto", "catalogue")
        cluster = plan.made_for or (find_cluster(trainer.cluster) if named else cluster_here(world))
        peak = peak_of(cluster, compiled.dtype, world.size)
    except (ClusterError, PlanError):  # a device missing from the catalogue
        return Meter(predicted=predicted)
    return Meter(flops_per_row=compiled.model.flops / compiled.rows, peak=peak, predicted=predicted)


def arithmetic(module: nn.Module, precision: Any) -> str:
    """The dtype whose peak counts."""
    requested = read_precision(precision)
    if requested.compute or requested.parameters:
        return str(requested.compute or requested.parameters)
    floating = [parameter.dtype for parameter in module.parameters() if parameter.is_floating_point()]
    dtype = str(floating[0] if floating else torch.float32).removeprefix("torch.")
    fast = dtype == "float32" and torch.get_float32_matmul_precision() != "highest"
    return "tfloat32" if fast else dtype


def seed_everything(seed: int) -> None:
    """Seed all generators alike on all ranks."""
    random.seed(seed)
    numpy.random.seed(seed)
    torch.manual_seed(seed)


def described(settings: Mapping[str, Any]) -> str:
    """Settings passed in Python as readable YAML; objects are named by their classes."""
    text: str = yaml.safe_dump({name: _plain(value) for name, value in settings.items()}, sort_keys=False)
    return text


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and type(value).__module__.startswith(SETTINGS):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple) and len(value) > LONG:
        return f"{len(value)} of {type(value[0]).__name__}"
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    named = value if isinstance(value, type) or hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"

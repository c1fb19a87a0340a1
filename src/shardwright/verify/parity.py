"""`verify`: the original and the compiled program on the same global batch, compared.

    the original, on one device          the program, on every rank
    forward, backward, step  x 3         forward, backward, step  x 3
              \\                            /  (shards gathered, on every rank)
               outputs, gradients, parameters, buffers
                          |
                        Report

Inside a running world (torchrun) all ranks take part and all get the same report. In a single
process the ranks are started here, as threads or processes; without a plan, one plan of each kind
(`KINDS`) is tried on two ranks, since a single rank would prove nothing.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import AUTO, CapturedGraph, capture, cast, casting, copy_module, find_opaque, register_containers
from ..compile import copy_to_meta
from ..errors import InputError, LoweringError, PlanError, raise_all
from ..options import MOVED, CompileOptions, PipelineOptions, expect_only, read_options, refuse_moved
from ..plan import Plan
from ..plan.request import AutoPlan, PlanFile, PlanLike, PlanRequest, PlanSource, read_source, source_name, source_size
from ..plan.search_options import SearchOptions
from ..planning import only_scalars
from ..precision import NARROW, PrecisionLike, name_of, read_precision
from ..runtime.world import here, start
from ..wrapping import unwrapped
from . import rebind
from .compiled import CompiledSide, CompileTask
from .measure import TOLERANCE, Report, Row, compare, largest, worst_of
from .original import Original, check_original
from .ranks import run as run_on
from .run import OPTIMIZERS, Entry, Loss, MakeOptimizer, TrainingRun, VerifyTask, follow, loss_of

Where = Literal["world", "threads", "processes"]

KINDS = ("dp=2", "tp=2", "zero3=2", "pp=2")
"""The plans that are tried if none is passed."""


@refuse_moved("sw.verify", MOVED)
def verify(
    model: nn.Module, plan: PlanLike | None = None, *, example: Any,
    optimizer: MakeOptimizer | Literal["sgd", "adamw"] = "sgd", loss: Loss | None = None,
    dtype: torch.dtype | None = None, precision: PrecisionLike = None, steps: int = 3,
    entries: Sequence[Entry] = ("train",), tolerance: float | None = None, method: Where | None = None,
    ranks: int | None = None, seed: int = 0, pipeline: PipelineOptions | Mapping[str, Any] | None = None,
    compile: CompileOptions | Mapping[str, Any] | None = None,
) -> Report:  # fmt: skip
    """Run the original and the compiled program on the same batch and compare everything that training depends on.

    plan       as for parallelize; "auto" needs ranks, or a world. Default: "auto" in a world, else
               dp=2, tp=2, zero3=2 and pp=2, one after the other; the report names those that the model can't do.
    example    arguments of a call, at the global batch: a tuple, a dict, or (args, kwargs).
    optimizer  "sgd", "adamw", or a function of a list of parameters.
    loss       a function of the model's output; default: its loss, or a mix of its outputs.
    dtype      of the comparison: float64, or float32 with a precision.
    precision  as for parallelize; the original is cast alike, and both must agree to twice the eps of
               the narrowest dtype.
    entries    "train" compares outputs, gradients, buffers, and parameters after `steps` steps;
               "eval" compares outputs in evaluation mode.
    method     "world" inside torchrun; "threads" or "processes" start the ranks here. By default
               the world if there is one, else threads. Processes need a picklable model.
    ranks      number of ranks, if the plan does not fix it (a policy function).
    pipeline   PipelineOptions: microbatches, as for parallelize.
    compile    CompileOptions: opaque, outputs and timeout, as for parallelize; directory: where to write generated
               code, which is discarded without it.

    The model is not changed. Dropout is exact: both sides draw the same masks.
    """
    model = unwrapped(model)
    method = method or ("world" if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1 else "threads")
    options, microbatches = _read_options(compile, pipeline)
    if method == "world":
        start(options.timeout)
    device = here().device if method == "world" else torch.device("cpu")
    exact = read_precision(precision)
    exact.check_runs()
    base = dtype or (torch.float64 if precision is None else torch.float32)
    order = tuple(sorted(entries, reverse=True))
    task = make_task(
        model, example, base, device, optimizer=optimizer, loss=loss or loss_of, steps=steps, entries=order, seed=seed,
        precision=exact, outputs=options.outputs or "all",
    )  # fmt: skip
    find_opaque(task.module, options.opaque)
    run = ComparisonOptions(
        limit=_limit(task) if tolerance is None else tolerance, method=method, timeout=options.timeout,
        directory=options.directory,
    )  # fmt: skip
    if plan is None and method != "world" and ranks is None:
        return _each_kind(task, run, microbatches)
    source = read_source("auto" if plan is None else plan)
    count = here().size if method == "world" else ranks or _some_ranks(source)
    request = PlanRequest(
        source=source_for(model, example, source, task), options=SearchOptions(microbatches=microbatches)
    )
    if method == "world":
        _share(task.module)
    return compare_plan(make_reference(task), request, count, run, name=source_name(source))


def _read_options(
    compile: CompileOptions | Mapping[str, Any] | None, pipeline: PipelineOptions | Mapping[str, Any] | None
) -> tuple[CompileOptions, int | None]:
    """The options of a comparison, and the number of microbatches."""
    options, microbatches = read_options(CompileOptions, compile), read_options(PipelineOptions, pipeline)
    if options.batch_norm == "local":
        raise InputError(
            'CompileOptions(batch_norm="local") is not for sw.verify: the original normalizes the global batch, and '
            "the plan each rank's own samples, so that their results differ; compare without it, or with DDP"
        )
    expect_only(options, ("directory", "opaque", "outputs", "timeout"), "sw.verify", "it compares a whole model")
    expect_only(microbatches, ("microbatches",), "sw.verify", "it compares a step of the whole batch")
    return options, microbatches.microbatches


@dataclass(frozen=True, kw_only=True)
class ComparisonOptions:
    """How a comparison runs: how much may differ, where the ranks are, where code is written (None: discarded)."""

    limit: float
    method: Where = "threads"
    directory: str | Path | None = None
    timeout: float = 600.0


def _each_kind(task: VerifyTask, run: ComparisonOptions, microbatches: int | None) -> Report:
    """One report for a plan of each kind. Plans that the model can't do become notes, if any plan works."""
    reference = make_reference(task)
    rows: list[Row] = []
    notes: list[str] = [reference.note] if reference.note else []
    tried: list[str] = []
    for plan in KINDS:
        is_pipeline = plan.startswith("pp")  # only a pipeline splits the batch
        options = SearchOptions(microbatches=microbatches if is_pipeline else None)
        try:
            request = PlanRequest.read(plan, options=options)
            report = compare_plan(replace(reference, checks=()), request, ranks_of(request.source), run, name=plan)
        except (PlanError, LoweringError) as error:
            if isinstance(error, LoweringError) and not is_pipeline:
                raise  # only an indivisible batch is found so late
            notes.append(f"{plan} was not tried: {' '.join(str(error).split())}")
            continue
        tried.append(plan)
        rows += [replace(row, plan=plan) for row in report.rows]
    if not tried:
        raise_all(PlanError, f"{type(task.module).__name__} can't be split over 2 ranks by any plan:", notes)
    kind = name_of(task.precision) or str(task.dtype).removeprefix("torch.")
    title = f"{type(task.module).__name__} under {', '.join(tried)}, on 2 ranks each, {kind}"
    return Report(title=title, rows=(*rows, *reference.checks), tolerance=run.limit, notes=tuple(notes))


@dataclass(frozen=True, kw_only=True)
class Reference:
    """The original, captured and run: the reference for any number of plans."""

    side: Original
    run: TrainingRun
    checks: tuple[Row, ...]
    note: str


def make_reference(task: VerifyTask) -> Reference:
    """Run the original of a task."""
    side = Original(task)
    run = follow(side, task)
    checks, note = check_original(side)
    return Reference(side=side, run=run, checks=tuple(checks), note=note)


def compare_plan(
    reference: Reference, request: PlanRequest, count: int, run: ComparisonOptions, *, name: str
) -> Report:
    """Run the program of a plan on `count` ranks, and compare it with the reference."""
    task = reference.side.task
    with ExitStack() as stack:
        folder = Path(run.directory) if run.directory else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        captures = _captures(reference.side) if run.method == "threads" else {}
        order = CompileTask(task=task, request=request, directory=folder, captures=captures)
        if run.method == "world":
            rows = _agree(_on_rank(here().rank, order, reference.run, run.limit))
        else:
            every = run_on(run.method, count, _on_rank, order, reference.run, run.limit, timeout=run.timeout)
            rows = worst_of(every)
    kind = name_of(task.precision) or str(task.dtype).removeprefix("torch.")
    title = f"{type(task.module).__name__} under {name} on {count} ranks, {kind}"
    notes = (reference.note,) if reference.note else ()
    return Report(title=title, rows=(*rows, *reference.checks), tolerance=run.limit, notes=notes)


def make_task(
    model: nn.Module, example: Any, dtype: torch.dtype, device: torch.device, *,
    optimizer: MakeOptimizer | str = "sgd", **options: Any,
) -> VerifyTask:  # fmt: skip
    """A copy of the model and its arguments in the dtype of the comparison; `options` are fields of the task."""
    entries, steps = options.get("entries", ("train",)), options.get("steps", 3)
    if not entries or not set(entries) <= {"train", "eval"}:
        raise InputError(f'entries={entries!r}: use ("train",), ("eval",) or ("train", "eval")')
    if steps < 1:
        raise InputError(f"steps={steps} trains nothing; use at least 1")
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer={optimizer!r}; use {', '.join(map(repr, OPTIMIZERS))} or a function of parameters")
    if any(parameter.is_meta for parameter in model.parameters()):
        raise InputError("the model has parameters on meta; verify runs it, so materialise and initialise them first")

    def moved(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        copied = leaf.detach().to(device, dtype if leaf.is_floating_point() else leaf.dtype, copy=True)
        return copied.requires_grad_(leaf.requires_grad)

    called = arguments_of(example)
    register_containers(called)  # or tree_map would take an object with tensors for a leaf
    args, kwargs = pytree.tree_map(moved, called)
    return VerifyTask(
        module=copy_module(model).to(device=device, dtype=dtype), args=args, kwargs=kwargs,
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer, **options,
    )  # fmt: skip


def _limit(task: VerifyTask) -> float:
    """The tolerance: twice the eps of the narrowest dtype of a precision."""
    precision = task.precision
    names = {
        precision.compute,
        precision.parameters,
        precision.sync,
        precision.buffers,
        precision.inputs,
        *dict(precision.overrides).values(),
    }
    narrow = [torch.finfo(getattr(torch, name)).eps for name in NARROW if name in names]
    return 2 * max(narrow) if narrow else TOLERANCE.get(task.dtype, 1e-2)


def source_for(model: nn.Module, example: Any, source: PlanSource, task: VerifyTask) -> PlanSource:
    """The source of a plan, for the copy in the dtype of the comparison."""
    if not isinstance(source, Plan | PlanFile):
        return source
    args, kwargs = arguments_of(example)
    entry = "train" if "train" in task.entries else "eval"
    skeleton = cast(copy_to_meta(model), task.precision)
    find_opaque(skeleton, "auto" if AUTO in vars(task.module) else "marked")
    if skeleton.training != (entry == "train"):
        skeleton.train(entry == "train")
    with casting(skeleton, task.precision):
        old = capture(skeleton, args, kwargs, entry=entry, real=lambda: (model, args, kwargs)).graph
    old = old if task.outputs == "all" else only_scalars(old)
    known = rebind.read(source, old)

    return rebind.PlanOfOriginal(plan=known, graph=old)


def _some_ranks(source: PlanSource) -> int:
    """The number of ranks of a plan; "auto" needs it from the user."""
    if isinstance(source, AutoPlan):
        raise InputError('plan="auto" on one rank splits nothing, so it proves nothing; set the number of ranks '
                         "with ranks=2, pass a plan, or leave it out to try one of each kind")  # fmt: skip
    return ranks_of(source)


def ranks_of(source: PlanSource) -> int:
    """The number of ranks of a plan."""
    size = 1 if isinstance(source, AutoPlan) else source_size(source)
    if size is None:
        raise InputError("a policy function does not fix the number of ranks; pass ranks=2")
    return size


def _captures(side: Original) -> dict[tuple[bool, int], CapturedGraph]:
    """The graphs captured by the reference, for ranks in this process."""
    captures = {(entry == "train", number): side.captured(entry) for number, entry in enumerate(side.task.entries)}
    if side.task.outputs == "all":
        return captures
    return {key: replace(captured, graph=only_scalars(captured.graph)) for key, captured in captures.items()}


def _on_rank(rank: int, order: CompileTask, original: TrainingRun, tolerance: float) -> list[Row]:
    """Run the compiled program on this rank and compare it with the original."""
    mine = follow(CompiledSide(order), order.task)
    scale = 0.0
    runs: list[list[Row]] = []
    for step_taken, step in zip(mine.steps, original.steps, strict=True):
        scale = largest(step.gradients.values())
        runs.append(compare("output", step_taken.outputs, step.outputs, scale, tolerance))
        runs.append(compare("gradient", step_taken.gradients, step.gradients, scale, tolerance))
    if "train" in order.task.entries:
        runs.append(compare("parameter", mine.parameters, original.parameters, scale, tolerance))
    runs.append(compare("buffer", mine.buffers, original.buffers, scale, tolerance))
    scale = max(scale, largest(original.evaluated.values()))
    runs.append(compare("eval output", mine.evaluated, original.evaluated, scale, tolerance))
    return list(worst_of(runs))


def _agree(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The worst of every row over all ranks, on every rank."""
    if not dist.is_initialized() or not rows:
        return tuple(rows)
    deviations = torch.tensor([row.deviation for row in rows], dtype=torch.float64, device=here().device)
    dist.all_reduce(deviations, dist.ReduceOp.MAX)
    return tuple(
        replace(row, deviation=float(deviation)) for row, deviation in zip(rows, deviations.tolist(), strict=True)
    )


def _share(module: nn.Module) -> None:
    """Unseeded scripts differ between ranks: broadcast from rank 0."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with torch.no_grad():
            for tensor in (*module.parameters(), *module.buffers()):
                shared = tensor.detach().contiguous()
                dist.broadcast(shared, 0)
                tensor.copy_(shared)


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """An example as (args, kwargs)."""
    if isinstance(example, Tensor):
        return (example,), {}
    if isinstance(example, dict):
        return (), dict(example)
    if not isinstance(example, tuple | list):
        raise InputError(f"example is a {type(example).__name__}; pass a tuple of arguments, a dict, or (args, kwargs)")
    if len(example) == 2 and isinstance(example[0], tuple) and isinstance(example[1], dict):
        return example[0], example[1]
    return tuple(example), {}

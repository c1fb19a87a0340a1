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

import json
import math
import os
import tempfile
from collections.abc import Sequence
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
from ..ir import Graph
from ..plan import Plan, parse_plan_string
from ..planning import Batching, PlanLike
from ..precision import NARROW, Precision, PrecisionLike, name_of, read_precision
from ..runtime.world import here, start
from ..wrapping import unwrapped
from . import ranks, rebind
from .compiled import CompiledSide, CompileTask
from .measure import TOLERANCE, Report, Row, compare, largest, worst_of
from .original import Original, check_original
from .run import OPTIMIZERS, Entry, Loss, MakeOptimizer, TrainingRun, VerifyTask, follow, loss_of

Where = Literal["world", "threads", "processes"]

KINDS = ("dp=2", "tp=2", "zero3=2", "pp=2")
"""The plans that are tried if none is passed."""


def verify(
    model: nn.Module,
    plan: PlanLike | None = None,
    *,
    example: Any,
    optimizer: MakeOptimizer | Literal["sgd", "adamw"] = "sgd",
    loss: Loss | None = None,
    dtype: torch.dtype | None = None,
    precision: PrecisionLike = None,
    steps: int = 3,
    entries: Sequence[Entry] = ("train",),
    tolerance: float | None = None,
    directory: str | Path | None = None,
    method: Where | None = None,
    size: int | None = None,
    seed: int = 0,
    timeout: float = 600.0,
    opaque: Literal["marked", "auto"] = "marked",
    microbatches: int | None = None,
) -> Report:
    """Run the original and the compiled program on the same batch and compare everything that training depends on.

    plan       as for parallelize; "auto" needs a size, or a world. Default: "auto" in a world, else
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
    size       number of ranks, if the plan does not fix it (a policy function).
    directory  where to write generated code; default: discarded.
    opaque, microbatches  as for parallelize.

    The model is not changed. Dropout is exact: both sides draw the same masks.
    """
    model = unwrapped(model)
    method = method or ("world" if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1 else "threads")
    if method == "world":
        start(timeout)
    device = here().device if method == "world" else torch.device("cpu")
    exact = read_precision(precision)
    base = dtype or (torch.float64 if precision is None else torch.float32)
    order = tuple(sorted(entries, reverse=True))
    task = make_task(model, example, base, device, optimizer, loss, steps, order, seed, exact)
    find_opaque(task.module, opaque)
    limit = _limit(task) if tolerance is None else tolerance
    batching = Batching(microbatches=microbatches)
    if plan is None and method != "world" and size is None:
        return _each_kind(task, limit=limit, directory=directory, method=method, timeout=timeout, batching=batching)
    request = plan_for(model, example, plan or "auto", task)
    count = here().size if method == "world" else size or _some_ranks(plan or "auto")
    if method == "world":
        _share(task.module)
    return compare_plan(make_reference(task), request, plan_name=_plan_name(plan or "auto"), count=count, limit=limit,
                        directory=directory, method=method, timeout=timeout, batching=batching)  # fmt: skip


def _each_kind(
    task: VerifyTask, *, limit: float, directory: str | Path | None, method: Where, timeout: float, batching: Batching
) -> Report:
    """One report for a plan of each kind. Plans that the model can't do become notes, if any plan works."""
    reference = make_reference(task)
    rows: list[Row] = []
    notes: list[str] = [reference.note] if reference.note else []
    tried: list[str] = []
    for plan in KINDS:
        own_batching = batching if plan.startswith("pp") else Batching()  # only a pipeline splits the batch
        try:
            report = compare_plan(replace(reference, checks=()), plan, plan_name=plan, count=ranks_of(plan),
                          limit=limit, directory=directory, method=method, timeout=timeout,
                          batching=own_batching)  # fmt: skip
        except (PlanError, LoweringError) as error:
            if isinstance(error, LoweringError) and own_batching is not batching:
                raise  # only an indivisible batch is found so late
            notes.append(f"{plan} was not tried: {' '.join(str(error).split())}")
            continue
        tried.append(plan)
        rows += [replace(row, plan=plan) for row in report.rows]
    if not tried:
        raise_all(PlanError, f"{type(task.module).__name__} can't be split over 2 ranks by any plan:", notes)
    kind = name_of(task.precision) or str(task.dtype).removeprefix("torch.")
    title = f"{type(task.module).__name__} under {', '.join(tried)}, on 2 ranks each, {kind}"
    return Report(title=title, rows=(*rows, *reference.checks), tolerance=limit, notes=tuple(notes))


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
    reference: Reference, plan: PlanLike, *, plan_name: str, count: int, limit: float, method: Where,
    directory: str | Path | None = None, timeout: float = 600.0, batching: Batching | None = None,
) -> Report:  # fmt: skip
    """Run the program of a plan on every rank, and compare it with the reference."""
    task = reference.side.task
    with ExitStack() as stack:
        folder = Path(directory) if directory else Path(stack.enter_context(tempfile.TemporaryDirectory()))
        captures = _captures(reference.side) if method == "threads" else {}
        own_batching = batching or Batching()
        order = CompileTask(task=task, plan=plan, directory=folder, captures=captures, batching=own_batching)
        if method == "world":
            rows = _agree(_on_rank(here().rank, order, reference.run, limit))
        else:
            every = ranks.run(method, count, _on_rank, order, reference.run, limit, timeout=timeout)
            rows = worst_of(every)
    kind = name_of(task.precision) or str(task.dtype).removeprefix("torch.")
    title = f"{type(task.module).__name__} under {plan_name} on {count} ranks, {kind}"
    notes = (reference.note,) if reference.note else ()
    return Report(title=title, rows=(*rows, *reference.checks), tolerance=limit, notes=notes)


def make_task(
    model: nn.Module, example: Any, dtype: torch.dtype, device: torch.device,
    optimizer: MakeOptimizer | str = "sgd", loss: Loss | None = None, steps: int = 3,
    entries: tuple[Entry, ...] = ("train",), seed: int = 0, precision: Precision | None = None,
) -> VerifyTask:  # fmt: skip
    """A copy of the model and its arguments in the dtype of the comparison."""
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
        optimizer=OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer, loss=loss or loss_of,
        steps=steps, entries=entries, seed=seed, precision=precision or Precision(),
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


def plan_for(model: nn.Module, example: Any, plan: PlanLike, task: VerifyTask) -> PlanLike:
    """The plan, for the copy in the dtype of the comparison."""
    is_file = isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json"))
    if not isinstance(plan, Plan) and not is_file:
        return plan
    args, kwargs = arguments_of(example)
    entry = "train" if "train" in task.entries else "eval"
    skeleton = cast(copy_to_meta(model), task.precision)
    find_opaque(skeleton, "auto" if AUTO in vars(task.module) else "marked")
    if skeleton.training != (entry == "train"):
        skeleton.train(entry == "train")
    with casting(skeleton, task.precision):
        old = capture(skeleton, args, kwargs, entry=entry, real=lambda: (model, args, kwargs)).graph
    known = rebind.read(plan, old)  # type: ignore[arg-type]

    def again(new: Graph, world: int) -> Plan:
        return rebind.rebind(known, old, new)

    return again


def _some_ranks(plan: PlanLike) -> int:
    """The number of ranks of a plan; "auto" needs it from the user."""
    if plan == "auto":
        raise InputError('plan="auto" on one rank splits nothing, so it proves nothing; set the number of ranks '
                         "with size=2, pass a plan, or leave it out to try one of each kind")  # fmt: skip
    return ranks_of(plan)


def ranks_of(plan: PlanLike) -> int:
    """The number of ranks of a plan."""
    if isinstance(plan, Plan):
        return plan.size
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        try:
            data = json.loads(Path(plan).read_text())
            segments = next(iter(data["entries"].values()), ())
            devices = {device for segment in segments for device in segment.get("devices", ())}
            return len(devices) or math.prod(data["mesh"].values())
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PlanError(f"{plan} is not a plan file: it has no mesh ({error})") from error
    if isinstance(plan, str):
        return 1 if plan == "auto" else parse_plan_string(plan).size
    raise InputError("a policy function does not fix the number of ranks; pass size=2")


def _captures(side: Original) -> dict[tuple[bool, int], CapturedGraph]:
    """The graphs captured by the reference, for ranks in this process."""
    return {(entry == "train", number): side.captured(entry) for number, entry in enumerate(side.task.entries)}


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


def _plan_name(plan: PlanLike) -> str:
    if isinstance(plan, Plan):
        return plan.policy or "a plan"
    return str(plan) if isinstance(plan, str | Path) else getattr(plan, "__name__", "a policy")


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

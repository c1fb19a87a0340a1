"""`rehearse`: a plan for thousands of devices run for real on a laptop, before GPUs are rented.

    the plan, the model at its real sizes                  nothing is allocated
        |  fewer pipeline ranks, shorter axes              stages.py
        |  a few layers of each kind                       layers.py
        |  small sizes, by the atoms of all dims           sizes.py, shrink.py, arguments.py
        v
    the same plan for a small graph                        with every split, schedule, storage and recomputation
        |  lowered, and the same plan at real sizes too     the two programs must be equal except for sizes
        v
    compiled and trained, ranks as threads                 compared with the small graph on one device in float64

It can't show whether the graph computes what the model does (`verify` does, at sizes that fit), memory, or speed.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture import CapturedGraph, capture, cast, casting, find_opaque
from ..compile import copy_to_meta
from ..errors import InputError, NonFiniteError
from ..options import MOVED, CompileOptions, expect_only, read_options, refuse_moved
from ..plan import Plan
from ..plan.request import AutoPlan, PlanFile, PlanLike, PlanRequest, PlanSource, read_source, source_name
from ..planning import check_batch_norm, make_plan, only_scalars
from ..precision import NAMED, PrecisionLike, read_precision
from ..probe import probing
from ..rules import analyse
from ..verify.measure import TOLERANCE, Report, largest
from ..verify.original import Original
from ..verify.parity import ComparisonOptions, Reference, arguments_of, compare_plan, ranks_of
from ..verify.run import OPTIMIZERS, MakeOptimizer, follow
from .result import Rehearsal
from .small import SmallPlan, shrink

RATES = (0.1, 1e-3, 1e-6)
"""Learning rates that are tried until training stays bounded."""

BOUND = 1e8


@refuse_moved("sw.rehearse", MOVED)
def rehearse(
    plan: PlanLike, model: nn.Module, *, example: Any, precision: PrecisionLike = None,
    optimizer: MakeOptimizer | Literal["sgd", "adamw"] = "sgd", steps: int = 3, ranks: int | None = None, seed: int = 0,
    compile: CompileOptions | Mapping[str, Any] | None = None,
) -> Rehearsal:  # fmt: skip
    """Run a plan at small sizes in this process and compare it with one device, in float64.

    plan       a Plan, the path of a plan file, or a plan string such as "dp=64,tp=8".
    model      as planned: at its real sizes, on meta if it is large.
    example    arguments of a call at the global batch; they may be on meta too.
    precision  of the plan; default: the one the plan names.
    steps      optimizer steps that are compared.
    ranks      number of ranks, if the plan does not fix it (a policy function).
    compile    CompileOptions: outputs ("scalars" if the program returns only the loss), opaque and timeout, as for
               parallelize; directory: where to write generated code, which is discarded without it.
    """
    began = time.monotonic()
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer={optimizer!r}; use {', '.join(map(repr, OPTIMIZERS))} or a function of parameters")
    if steps < 1:
        raise InputError(f"steps={steps} trains nothing; use at least 1")
    options = read_options(CompileOptions, compile)
    expect_only(
        options, ("directory", "outputs", "opaque", "timeout"), "sw.rehearse", "it runs a plan for a whole model"
    )
    source = read_source(plan)
    known, captured = _read(source, model, example, precision, options, ranks)
    check_batch_norm(known, captured.graph)
    name = known.policy or "a plan" if callable(source) else source_name(source)
    small = shrink(known, captured, model, pytree.tree_leaves(_ordered(captured, example)), seed)
    report = _run(small, optimizer, steps, name, options)
    return small.result(f"{captured.graph.name}, {name}", known, report, time.monotonic() - began)


def _run(small: SmallPlan, optimizer: MakeOptimizer | str, steps: int, name: str, options: CompileOptions) -> Report:
    """Train the small graph on one device and under its plan."""
    reference, request = _reference(small, optimizer, steps), PlanRequest(source=small.plan)
    run = ComparisonOptions(limit=TOLERANCE[torch.float64], directory=options.directory, timeout=options.timeout)
    return compare_plan(reference, request, small.plan.size, run, name=name)


def _reference(small: SmallPlan, optimizer: MakeOptimizer | str, steps: int) -> Reference:
    """The small graph trained on one device, with a learning rate small enough that it does not diverge.

    Values that have diverged would compare equal to anything.
    """
    own = OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
    for rate in RATES if optimizer == "sgd" else RATES[:1]:
        make = partial(_sgd, rate) if optimizer == "sgd" else own
        task = small.small_call.task(small.graph, make, steps)
        captured = small.small_call.call(small.graph, task.module)
        side = Original(task, by_graph=True, promote=False, captures={("train", False): captured})
        run = follow(side, task)
        every = [tensor for step in run.steps for tensor in (*step.outputs.values(), *step.gradients.values())]
        every += run.parameters.values()
        finite = all(bool(tensor.isfinite().all()) for tensor in every if tensor is not None)
        if finite and largest(every) < BOUND:
            slow = f"trained with a learning rate of {rate}: larger ones diverge" if rate < RATES[0] else ""
            return Reference(side=side, run=run, checks=(), note=slow)
    raise NonFiniteError(
        f"{small.graph.name} does not train for {steps} steps from the random values of a rehearsal: outputs, "
        f"gradients or parameters are not finite, or beyond {BOUND:.0e}; pass steps=1 or another optimizer"
    )


def _sgd(rate: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate)


def _read(
    source: PlanSource, model: nn.Module, example: Any, precision: PrecisionLike, options: CompileOptions,
    size: int | None,
) -> tuple[Plan, CapturedGraph]:  # fmt: skip
    """The plan, and its call."""
    if isinstance(source, AutoPlan):
        raise InputError('rehearse needs an existing plan: a file, a Plan, or a string such as "dp=64,tp=8"; '
                         "make one with shardwright plan -o plan.json")  # fmt: skip
    exact = read_precision(_precision_of(source) if precision is None else precision)
    exact.check_runs()
    args, kwargs = arguments_of(example)
    skeleton = find_opaque(cast(copy_to_meta(model), exact), options.opaque)
    if not skeleton.training:
        skeleton.train()
    with casting(skeleton, exact):
        captured = capture(skeleton, args, kwargs, entry="train", real=lambda: (model, args, kwargs))
    captured = replace(captured, padding=())  # the plan is for the program with its mask, whatever a batch is like
    if options.outputs == "scalars":
        captured = replace(captured, graph=only_scalars(captured.graph))
    graph = captured.graph
    if isinstance(source, PlanFile):
        return source.load(graph), captured
    if isinstance(source, Plan):
        return source, captured
    analysis = analyse(graph, probing(captured.functions))
    return make_plan(graph, analysis, PlanRequest(source=source), size or ranks_of(source)), captured


def _precision_of(source: PlanSource) -> str | None:
    """The precision that a plan names."""
    if isinstance(source, Plan):
        predicted = source.predicted
    elif isinstance(source, PlanFile):
        predicted = source.data.get("predicted", {})
    else:
        return None
    names = (cost.get("for", {}).get("precision") for cost in predicted.values())
    return next((name for name in names if name in NAMED), None)


def _ordered(captured: CapturedGraph, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in capture order."""
    args, kwargs = arguments_of(example)
    return args, {name: kwargs[name] for name in captured.keywords}

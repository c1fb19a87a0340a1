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

import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture import CapturedGraph, capture, cast, casting, find_opaque
from ..compile import Outputs, copy_to_meta
from ..errors import InputError, NonFiniteError
from ..plan import Plan
from ..plan.file import load as load_plan
from ..planning import PlanLike, make_plan, only_scalars
from ..precision import NAMED, PrecisionLike, read_precision
from ..probe import probing
from ..rules import analyse
from ..verify.measure import TOLERANCE, Report, largest
from ..verify.original import Original
from ..verify.parity import Reference, arguments_of, compare_plan, ranks_of
from ..verify.run import OPTIMIZERS, MakeOptimizer, follow
from .result import Rehearsal
from .small import SmallPlan, shrink

RATES = (0.1, 1e-3, 1e-6)
"""Learning rates that are tried until training stays bounded."""

BOUND = 1e8


def rehearse(
    plan: PlanLike, model: nn.Module, *, example: Any, precision: PrecisionLike = None, outputs: Outputs = "all",
    optimizer: MakeOptimizer | Literal["sgd", "adamw"] = "sgd", steps: int = 3, size: int | None = None,
    directory: str | Path | None = None, seed: int = 0, timeout: float = 600.0,
    opaque: Literal["marked", "auto"] = "marked",
) -> Rehearsal:  # fmt: skip
    """Run a plan at small sizes in this process and compare it with one device, in float64.

    plan       a Plan, the path of a plan file, or a plan string such as "dp=64,tp=8".
    model      as planned: at its real sizes, on meta if it is large.
    example    arguments of a call at the global batch; they may be on meta too.
    precision  of the plan; default: the one the plan names.
    outputs    as for parallelize: "scalars" if the program returns only the loss.
    steps      optimizer steps that are compared.
    size       number of devices, if the plan does not fix it (a policy function).
    directory  where to write generated code; default: discarded.
    """
    began = time.monotonic()
    if isinstance(optimizer, str) and optimizer not in OPTIMIZERS:
        raise InputError(f"optimizer={optimizer!r}; use {', '.join(map(repr, OPTIMIZERS))} or a function of parameters")
    if steps < 1:
        raise InputError(f"steps={steps} trains nothing; use at least 1")
    known, captured = _read(plan, model, example, precision, outputs, size, opaque)
    small = shrink(known, captured, model, pytree.tree_leaves(_ordered(captured, example)), seed)
    report = _run(small, optimizer, steps, _name(plan, known), directory, timeout)
    return small.result(f"{captured.graph.name}, {_name(plan, known)}", known, report, time.monotonic() - began)


def _run(
    small: SmallPlan, optimizer: MakeOptimizer | str, steps: int, name: str, directory: str | Path | None,
    timeout: float,
) -> Report:  # fmt: skip
    """Train the small graph on one device and under its plan."""
    reference = _reference(small, optimizer, steps)
    return compare_plan(
        reference, small.plan, plan_name=name, count=small.plan.size, limit=TOLERANCE[torch.float64],
        directory=directory, method="threads", timeout=timeout,
    )  # fmt: skip


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
    plan: PlanLike, model: nn.Module, example: Any, precision: PrecisionLike, outputs: Outputs, size: int | None,
    opaque: Literal["marked", "auto"],
) -> tuple[Plan, CapturedGraph]:  # fmt: skip
    """The plan, and its call."""
    if plan == "auto":
        raise InputError('rehearse needs an existing plan: a file, a Plan, or a string such as "dp=64,tp=8"; '
                         "make one with shardwright plan -o plan.json")  # fmt: skip
    exact = read_precision(_precision_of(plan) if precision is None else precision)
    args, kwargs = arguments_of(example)
    skeleton = find_opaque(cast(copy_to_meta(model), exact), opaque)
    if not skeleton.training:
        skeleton.train()
    with casting(skeleton, exact):
        captured = capture(skeleton, args, kwargs, entry="train", real=lambda: (model, args, kwargs))
    if outputs == "scalars":
        captured = replace(captured, graph=only_scalars(captured.graph))
    graph = captured.graph
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return load_plan(plan, graph), captured
    if isinstance(plan, Plan):
        return plan, captured
    analysis = analyse(graph, probing(captured.functions))
    return make_plan(graph, analysis, plan, size or ranks_of(plan)), captured


def _precision_of(plan: PlanLike) -> str | None:
    """The precision that a plan names."""
    if isinstance(plan, Plan):
        predicted = plan.predicted
    elif isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        predicted = json.loads(Path(plan).read_text()).get("predicted", {})
    else:
        return None
    names = (cost.get("for", {}).get("precision") for cost in predicted.values())
    return next((name for name in names if name in NAMED), None)


def _ordered(captured: CapturedGraph, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call in capture order."""
    args, kwargs = arguments_of(example)
    return args, {name: kwargs[name] for name in captured.keywords}


def _name(plan: PlanLike, known: Plan) -> str:
    if isinstance(plan, str | Path):
        return str(plan)
    return known.policy or "a plan"

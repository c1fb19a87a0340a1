"""`rehearse`: a plan for thousands of devices run for real on a laptop, before a GPU is rented.

    the plan, the model at its real sizes                  nothing is allocated
        |  fewer pipeline ranks, shorter axes              stages.py
        |  a few layers of each kind                       layers.py
        |  small sizes, by the atoms of all dims           sizes.py, shrink.py, arguments.py
        v
    the same plan for a small graph                        every split, schedule, storage and recomputation kept
        |  lowered, beside the same plan at real sizes     the two programs must be one but for their sizes
        v
    compiled and trained, ranks as threads                 compared with the small graph on one device in float64

What it can't show: whether the graph is what the model computes (`verify` does, at sizes that fit), memory, and speed.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ..capture import Captured, capture, cast, casting, find_opaque
from ..compile import Outputs, skeleton_of
from ..errors import InputError, NonFiniteError, PlanError
from ..ir import Graph
from ..lower import Program
from ..plan import Plan
from ..plan.file import load as load_plan
from ..planning import PlanLike, make_plan, only_scalars
from ..precision import NAMED, PrecisionLike, read_precision
from ..probe import probing
from ..rules import analyse
from ..verify.measure import TOLERANCE, Report, largest
from ..verify.original import Original
from ..verify.parity import Reference, arguments_of, hold, ranks_of
from ..verify.run import OPTIMIZERS, MakeOptimizer, follow
from .layers import KeptLayers, drop_layers
from .result import Rehearsal, collectives_of, differences
from .shrink import fit, widened
from .sizes import Sizes, choose_sizes, small_axes
from .stages import shrink_cluster
from .stand_in import StandIn
from .translate import decided_by, lowered, shared_by, storage_of, stored_by, translated

TRIES = 6
"""Sizes of the mesh that are tried until the small program does what the real one does."""

RATES = (0.1, 1e-3, 1e-6)
"""Learning rates that are tried until training stays within bounds."""

BOUND = 1e8


def rehearse(
    plan: PlanLike, model: nn.Module, *, example: Any, precision: PrecisionLike = None, outputs: Outputs = "all",
    optimizer: MakeOptimizer | Literal["sgd", "adamw"] = "sgd", steps: int = 3, size: int | None = None,
    directory: str | Path | None = None, seed: int = 0, timeout: float = 600.0,
    opaque: Literal["marked", "auto"] = "marked",
) -> Rehearsal:  # fmt: skip
    """Run a plan at small sizes in this process and compare it with one device, in float64.

    plan       a Plan, the path of a plan file, or a plan string such as "dp=64,tp=8".
    model      as it is planned: at its real sizes, and on meta if it is large.
    example    arguments of a call at the global batch; they may be on meta too.
    precision  that the plan was made for; by default what the plan says.
    outputs    as for parallelize: "scalars" if only the loss leaves the model.
    steps      optimizer steps that are compared.
    size       how many devices, where the plan does not say it (a policy function).
    directory  where generated code is kept; by default it is thrown away.
    """
    began = time.monotonic()
    known, captured = _read(plan, model, example, precision, outputs, size, opaque)
    small = shrink(known, captured, model, example, seed)
    report = _run(small, optimizer, steps, _said(plan, known), directory, timeout)
    return small.result(f"{captured.graph.name}, {_said(plan, known)}", known, report, time.monotonic() - began)


@dataclass(frozen=True, kw_only=True)
class SmallPlan:
    """A plan and its graph with few layers, at real sizes and at small ones.

    changed   where the small program is not what the real one is but for sizes
    """

    layers: tuple[KeptLayers, ...]
    real: Plan
    sizes: Sizes
    graph: Graph  # at small sizes
    plan: Plan
    programs: tuple[Program, ...]
    changed: tuple[str, ...]
    stand_in: StandIn

    def result(self, title: str, known: Plan, report: Report, seconds: float) -> Rehearsal:
        """What is to be said of a run."""
        real, small = ([held.mesh for held in plan.segments] for plan in (self.real, self.plan))
        pairs = dict.fromkeys((str(one), str(other)) for one, other in zip(real, small, strict=True))
        return Rehearsal(
            title=title, meshes=tuple(pairs), devices=(known.size, self.plan.size),
            microbatches=(known.microbatches, self.plan.microbatches),
            schedule=known.schedule if known.is_pipeline else "", layers=self.layers,
            sizes=tuple(sorted(self.sizes.images.items())), kept=self.sizes.kept(),
            collectives=collectives_of(self.programs), changed=self.changed, report=report, seconds=seconds,
        )  # fmt: skip


def shrink(plan: Plan, captured: Captured, model: nn.Module, example: Any, seed: int = 0) -> SmallPlan:
    """A plan for a captured call at small sizes, seen to run on one device.

    If the small program does not do the same as the real one, other sizes of the mesh are tried.
    """
    graph = captured.graph
    _check(plan, graph)
    cluster = shrink_cluster(plan, plan.entries[graph.entry])
    decided, layers, rename = drop_layers(decided_by(plan, widened(graph), cluster))
    facts = analyse(decided.graph, probing(captured.functions))
    meshes = cluster.meshes_of(cluster.axes)
    real = translated(plan, decided, facts, meshes, replace(cluster, microbatches=plan.microbatches))
    programs = lowered(decided.graph, real, facts)
    shared = [*shared_by(decided, facts, meshes, plan.microbatches), *stored_by(facts, programs, meshes)]
    given = tuple(pytree.tree_leaves(_ordered(captured, example)))
    stand_in = StandIn(captured=captured, module=model, leaves=given, rename=rename, seed=seed)
    best: SmallPlan | None = None
    refusal: PlanError | None = None
    for few in islice(small_axes(facts, shared, cluster.axes, cluster.microbatches), TRIES):
        try:
            sizes = choose_sizes(facts, shared, few)
        except PlanError as error:
            refusal = refusal or error
            continue
        small = fit(decided.graph, sizes, captured.functions, stand_in.attempt)
        after = analyse(small, probing(captured.functions))
        here = translated(plan, replace(decided, graph=small), after, cluster.meshes_of(few), cluster)
        made = lowered(small, here, after)
        changed = (*differences(programs, made), *_stored_otherwise(programs, real, made, here))
        found = SmallPlan(
            layers=layers, real=real, sizes=sizes, graph=small, plan=here, programs=made, changed=changed,
            stand_in=stand_in,
        )  # fmt: skip
        if best is None or len(changed) < len(best.changed):
            best = found
        if not changed:
            break
    if best is None:
        raise refusal or PlanError("the plan has no devices")
    return best


def _stored_otherwise(real: Sequence[Program], plan: Plan, small: Sequence[Program], here: Plan) -> list[str]:
    """The parameters that are not stored as in the plan."""
    one, other = (
        storage_of(programs, [held.mesh for held in of.segments]) for programs, of in ((real, plan), (small, here))
    )
    return [f"{a} is {b} at small sizes" for a, b in zip(one, other, strict=True) if a != b]


def _run(
    small: SmallPlan, optimizer: MakeOptimizer | str, steps: int, said: str, directory: str | Path | None,
    timeout: float,
) -> Report:  # fmt: skip
    """Train the small graph on one device and under its plan."""
    reference = _reference(small, optimizer, steps)
    return hold(
        reference, small.plan, said=said, count=small.plan.size, limit=TOLERANCE[torch.float64], directory=directory,
        method="threads", timeout=timeout,
    )  # fmt: skip


def _reference(small: SmallPlan, optimizer: MakeOptimizer | str, steps: int) -> Reference:
    """The small graph trained on one device, with steps small enough that it does not leave all bounds.

    What has grown beyond all bounds is equal to anything of its size.
    """
    rates = RATES if optimizer == "sgd" else (0.0,)
    for rate in rates:
        make = partial(_sgd, rate) if rate else OPTIMIZERS[optimizer] if isinstance(optimizer, str) else optimizer
        task = small.stand_in.task(small.graph, make, steps)
        captured = small.stand_in.call(small.graph, task.module)
        side = Original(task, by_graph=True, promote=False, captures={("train", False): captured})
        run = follow(side, task)
        every = [*(held for step in run.steps for held in (*step.outputs.values(), *step.gradients.values()))]
        every += run.parameters.values()
        finite = all(bool(held.isfinite().all()) for held in every if held is not None)
        if finite and largest(every) < BOUND:
            return Reference(side=side, run=run, checks=(), said="")
    raise NonFiniteError(
        f"{small.graph.name} does not train for {steps} steps from the random values of a rehearsal: outputs, "
        f"gradients or parameters are not finite, or beyond {BOUND:.0e}; pass steps=1 or another optimizer"
    )


def _sgd(rate: float, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=rate)


def _read(
    plan: PlanLike, model: nn.Module, example: Any, precision: PrecisionLike, outputs: Outputs, size: int | None,
    opaque: Literal["marked", "auto"],
) -> tuple[Plan, Captured]:  # fmt: skip
    """The plan, and the call that it is for."""
    if plan == "auto":
        raise InputError('rehearse takes a plan that is made: a file, a Plan, or a string such as "dp=64,tp=8"; '
                         "make one with shardwright plan -o plan.json")  # fmt: skip
    exact = read_precision(_precision_of(plan) if precision is None else precision)
    args, kwargs = arguments_of(example)
    skeleton = find_opaque(cast(skeleton_of(model), exact), opaque)
    if not skeleton.training:
        skeleton.train()
    with casting(skeleton, exact):
        captured = capture(skeleton, args, kwargs, entry="train", real=lambda: (model, args, kwargs))
    if outputs == "scalars":
        captured = replace(captured, graph=only_scalars(captured.graph))
    graph = captured.graph
    if isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        return load_plan(plan, graph), captured
    facts = analyse(graph, probing(captured.functions))
    return make_plan(graph, facts, plan, size or ranks_of(plan)), captured


def _precision_of(plan: PlanLike) -> str | None:
    """The precision that a plan says it was made for."""
    if isinstance(plan, Plan):
        predicted = plan.predicted
    elif isinstance(plan, Path) or (isinstance(plan, str) and plan.endswith(".json")):
        predicted = json.loads(Path(plan).read_text()).get("predicted", {})
    else:
        return None
    names = (held.get("for", {}).get("precision") for held in predicted.values())
    return next((name for name in names if name in NAMED), None)


def _check(plan: Plan, graph: Graph) -> None:
    plan.check_against(graph)
    if graph.entry not in plan.entries:
        raise PlanError(f"the plan has no entry {graph.entry!r}, and training is what is rehearsed; it has "
                        f"{', '.join(plan.entries)}")  # fmt: skip
    if plan.local:
        raise PlanError('a plan for microbatch_semantics="local" is not rehearsed: its model is not that of one device')
    if graph.branches:
        op = next(op for op in graph.ops if op.target in ("call.cond", "call.scan", "call.while_loop"))
        raise PlanError(f"{op} runs graphs of its own, which are not made smaller; use sw.verify on a small model")


def _ordered(captured: Captured, example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, kwargs = arguments_of(example)
    return args, {name: kwargs[name] for name in captured.keywords}


def _said(plan: PlanLike, known: Plan) -> str:
    if isinstance(plan, str | Path):
        return str(plan)
    return known.policy or "a plan"

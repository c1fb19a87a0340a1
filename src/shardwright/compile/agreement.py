"""What all ranks must have in common before they run a program together, compared when it is compiled.

Ranks that were started with other versions, other options or another model would each run a program of their own, and
wait for each other or add up what does not belong together. First come versions and options, since plans are made by
them; then what was made: the graph, the plan and the text of every program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING

import torch

from ..ir import Graph
from ..plan import Plan
from ..plan.request import PlanFile, PlanSource, source_name
from ..runtime import world
from ..runtime.collectives import objects
from ..runtime.model.inputs import PLAIN
from ..runtime.optimizer.adopt import several
from ..runtime.world import World
from .files import Generated

if TYPE_CHECKING:
    from .compiler import Compiler


def check_settings(compiler: Compiler) -> None:
    """Raise on all ranks if versions or options differ. All ranks must call it."""
    if compiler.world.size == 1:
        return
    remedy = "install the same packages everywhere, and pass the same arguments to parallelize on every rank"
    objects.check_equal(versions() | settings_of(compiler), "versions and settings", remedy)


def check_programs(here: World, graph: Graph, plan: Plan, generated: Sequence[Generated]) -> None:
    """Raise on all ranks if they have compiled different things. All ranks must call it."""
    if here.size == 1:
        return
    programs = [program.program.title or "program" for program in generated]
    analysis = {"call": graph.entry}  # what a rank alone does, such as an evaluation on rank 0, is reported first
    analysis |= {"graph": f"{graph.name} {graph.fingerprint}", "plan": f"{plan.policy} {bare(plan).name}"}
    analysis |= {title: code_digest(program.text) for title, program in zip(programs, generated, strict=True)}
    remedy = (
        "call the model on all ranks in the same order, in train or eval mode alike (an evaluation on rank 0 alone "
        "waits for the others: run it on all ranks and print on one), build the same model everywhere, from the same "
        "files, and pass the same plan"
    )
    objects.check_equal(analysis, "programs", remedy)


def versions() -> dict[str, str]:
    """The packages that decide what a program computes."""
    try:
        ours = version("shardwright")
    except PackageNotFoundError:  # run from its source
        ours = "not installed"
    return {"shardwright": ours, "torch": torch.__version__}


def settings_of(compiler: Compiler) -> dict[str, str]:
    """The options of a compiled model by their names in `parallelize`. Where files are written may differ."""
    settings, options = compiler.settings, compiler.settings.request.options
    stated: Mapping[str, object] = {
        "plan": plan_name(settings.request.source),
        "inputs": settings.inputs,
        "compile.outputs": settings.outputs,
        "precision": settings.precision,
        "pipeline.microbatches": options.microbatches,
        "pipeline.semantics": "local" if options.local else "global",
        "pipeline.backward": settings.backward,
        "memory": options.memory,
        "seed": settings.seed,
        "compile.unbatched": compiler.call_inputs.unbatched,
        "SHARDWRIGHT_COMPARE_INPUTS": world.compare_every(),
        "accumulate": settings.accumulate,
        "reduction": settings.reduction,
        "compile.opaque": settings.opaque,
        "compile.batch_norm": settings.batch_norm,
        **_optimizer_options(several(compiler.optimizer)),
    }
    return {name: str(value) for name, value in stated.items()}


def _optimizer_options(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, object]:
    """The kinds of optimizers and their plain options: a rate that one rank scales lets the replicas drift apart."""
    options: dict[str, object] = {"optimizer": ", ".join(type(optimizer).__name__ for optimizer in optimizers)}
    for number, optimizer in enumerate(optimizers):
        for at, group in enumerate(optimizer.param_groups):
            where = f"optimizer {number}, group {at}" if len(optimizers) > 1 else f"optimizer, group {at}"
            plain = {name: value for name, value in group.items() if isinstance(value, (*PLAIN, tuple))}
            options |= {f"{where}, {name}": value for name, value in plain.items()}
    return options


def plan_name(source: PlanSource) -> str:
    """A plan as somebody asked for it; a file by what is in it, since its path may differ."""
    if isinstance(source, Plan):
        return f"{source.policy} {bare(source).name}"
    if isinstance(source, PlanFile):
        path = source.path
        return f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()[:8] if path.exists() else 'missing'}"
    return source_name(source)


def bare(plan: Plan) -> Plan:
    """A plan without what is noted about it: predictions are those of the machine that made them."""
    return replace(plan, notes=(), predicted={}, cluster="")


def code_digest(text: str) -> str:
    """Eight digits of a program's code, without its head and its comments.

    They name the plan with its predictions, and files of the user, which may lie elsewhere on another machine.
    """
    lines = (line.split("  # ")[0].rstrip() for line in text.split('"""', 2)[-1].splitlines())
    code = "\n".join(line for line in lines if not line.lstrip().startswith("# "))
    return hashlib.sha256(code.encode()).hexdigest()[:8]

"""The public story: one line in a training script.

    model, optimizer = parallelize(model, optimizer)

capture -> graph -> rules -> plan -> lower -> emit -> runtime. Each step is one room of this
package; `compile.py` walks them for a call, this file is the door.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from .capture import capture, find_opaque
from .cluster import find as find_cluster
from .compile import Compiler, skeleton_of
from .errors import InputError
from .parts import Parts, replace_parts
from .plan import Plan
from .planning import PlanLike, make_plan
from .probe import probing
from .rules import analyse
from .runtime.inputs import Mode
from .runtime.model import ParallelModel
from .runtime.world import start

GENERATED = Path(".shardwright")
How = Literal["marked", "auto"]


def parallelize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    example: Any = None,
    plan: PlanLike = "auto",
    inputs: Mode = "same",
    outputs: Literal["all"] = "all",
    accumulate: int = 1,
    seed: int = 0,
    directory: str | Path = GENERATED,
    timeout: float = 600.0,
    parts: Parts | None = None,
    opaque: How = "marked",
) -> Any:
    """Compile a model for all processes of this run.

    example     arguments of a call: a tuple, a dict of keyword arguments, or (args, kwargs). Without
                it the model is compiled at its first call.
    plan        "auto", a plan string such as "dp=2,tp=2", a Plan, the path of a plan file, or a
                function (graph, number of devices) -> Plan.
    inputs      what a call passes: "same" (the global batch, everywhere), "rows" (each data-parallel
                group its rows), "gather" (each rank its rows).
    accumulate  sync gradients at every n-th backward only.
    directory   where generated code is written.
    parts       compile only these submodules, each at its first call, inside of the model, which stays an ordinary
                module: a list of paths, or a dict of paths and plans. Returns the same model then.
    opaque      "marked": submodules given to sw.opaque stay as they are; "auto": also the smallest submodules that
                can't be captured, with a warning.

    Returns the model, or the model and the optimizer if one was given: the same object, now
    working on the pieces.
    """
    if inputs not in ("same", "rows", "gather"):
        raise InputError(f'inputs={inputs!r} is not a mode; use "same", "rows" or "gather"')
    if outputs != "all":
        raise InputError(f'outputs={outputs!r}: only "all" is there, every rank sees the outputs')
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate} makes no sense; use 1 to sync at every backward")
    world = start(timeout=timeout)
    if parts is not None:
        if example is not None:
            raise InputError("parts are compiled at their first call, for what it gives them; leave example out")
        replace_parts(model, optimizer, parts, plan, world, inputs, accumulate, seed, Path(directory), opaque)
        return model if optimizer is None else (model, optimizer)
    compiler = Compiler(model, optimizer, world, plan, inputs, Path(directory), seed)
    find_opaque(compiler.skeleton, opaque)
    made = ParallelModel(compiler.skeleton, world, compiler, inputs, accumulate)
    if example is not None:
        args, kwargs = arguments_of(example)
        made.prepare(args, kwargs)
    else:
        made.show(model)
    return made if optimizer is None else (made, optimizer)


def plan(
    model: nn.Module, *, example: Any, plan: PlanLike = "auto", cluster: str | int = "cpu", entry: str = "train",
    opaque: How = "marked",
) -> Plan:  # fmt: skip
    """The plan for a model, without running anything: no processes, no GPU, and meta parameters are fine."""
    args, kwargs = arguments_of(example)
    skeleton = find_opaque(skeleton_of(model), opaque)
    captured = capture(skeleton, args, kwargs, entry=entry, real=lambda: (model, args, kwargs))
    size = cluster if isinstance(cluster, int) else cluster_size(cluster, plan)
    facts = analyse(captured.graph, probing(captured.functions))
    return make_plan(captured.graph, facts, plan, size)


def cluster_size(cluster: str, plan: PlanLike) -> int:
    """How many devices a name such as "8xA100-80GB" or a cluster file stands for; "cpu" is what the plan says."""
    if isinstance(plan, Plan):
        return plan.mesh.size
    total = find_cluster(cluster).size
    if total == 1 and isinstance(plan, str):
        from .plan import read_request

        return read_request("single" if plan == "auto" else plan).mesh.size if not plan.endswith(".json") else 1
    return total


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

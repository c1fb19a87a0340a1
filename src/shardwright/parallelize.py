"""The public story: one line in a training script.

    model, optimizer = parallelize(model, optimizer)

capture -> graph -> rules -> plan -> lower -> emit -> runtime. Each step is one room of this
package; `compile.py` walks them for a call, this file is the door.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn

from .capture import CapturedGraph, MaskFacts, capture, cast, casting, find_opaque
from .cluster import find as find_cluster
from .cluster import quantity
from .compile import Compiler, Outputs, copy_to_meta, with_unbatched
from .compiled_parts import Parts, replace_parts
from .cost import TrainingSetup
from .errors import InputError
from .plan import Plan
from .plan.auto import Progress, SearchOptions
from .plan.constraints import Constraints, ConstraintsLike, read_constraints
from .planning import Batching, PlanLike, PlanningTask, cluster_for, cluster_here, make_plan, only_scalars, training_of
from .precision import Precision, PrecisionLike, read_precision
from .probe import probing
from .rules import analyse
from .runtime.faults import watch
from .runtime.model.inputs import Mode
from .runtime.model.parallel_model import ParallelModel
from .runtime.model.reduction import LossReduction
from .runtime.optimizer.adopt import Optimizers, several
from .runtime.pipeline.autograd import Backward
from .runtime.world import World, start
from .wrapping import check_optimizers, unwrapped

GENERATED = Path(".shardwright")
How = Literal["marked", "auto"]
Semantics = Literal["global", "local"]


def parallelize(
    model: nn.Module, optimizer: Optimizers = None, *, example: Any = None, plan: PlanLike = "auto",
    cluster: str | Path = "auto", memory: str | float | None = None, constraints: ConstraintsLike | None = None,
    microbatches: int | None = None, microbatch_semantics: Semantics = "global", backward: Backward = "inside",
    precision: PrecisionLike = None, inputs: Mode = "global", outputs: Outputs = "all", accumulate: int = 1,
    reduction: LossReduction = "mean", seed: int = 0, directory: str | Path = GENERATED, timeout: float = 600.0,
    parts: Parts | None = None, opaque: How = "marked", unbatched: Sequence[str] | None = None,
) -> Any:  # fmt: skip
    """Compile a model for all processes of this run.

    example     arguments of a call: a tuple, a dict of keyword arguments, or (args, kwargs). Without
                it the model is compiled at its first call.
    plan        "auto", a plan string such as "dp=2,tp=2", a Plan, the path of a plan file, or a
                function (graph, number of devices) -> Plan.
    cluster     what "auto" plans for: the name of a cluster ("8xA100-80GB"), the path of a cluster file (written by
                shardwright calibrate), or "auto": the devices of this run as the catalogue knows them.
    memory      how much of a device's memory a plan may use, such as "70GiB".
    constraints what "auto" has to keep to: a list of dicts or the path of a YAML file, see docs/constraints.md.
    microbatches  how many parts of a batch go through a pipeline one after the other; without it a plan string takes
                about four a stage, and "auto" searches.
    microbatch_semantics  "global": the step is that of the whole batch; "local": each microbatch is a batch of its
                own, and losses are averaged (for models that can't be cut, such as those with batch norm).
    backward    of a pipeline: "inside" the call of the model, seeded by its loss, which keeps few microbatches
                alive; "outside": when backward of anything made of its outputs runs.
    precision   "fp32", "bf16-mixed", "fp16-mixed", "bf16", "fp16", or in full, see docs/precision.md; None: as it is.
    inputs      what a call passes: "global" (every rank the whole global batch), "per_replica" (each data-parallel
                replica its own samples), "per_rank" (each rank its own samples).
    outputs     "all": every rank gets all outputs; "scalars": only the loss and the like (logits stay sharded).
    accumulate  sync gradients at every n-th backward only.
    reduction   with inputs="per_replica" and a loss outside of the model: "mean" or "sum" over replicas, or "token",
                the mean over all labels that count, see docs/precision.md.
    directory   where generated code is written.
    parts       compile only these submodules, each at its first call, inside of the model, which stays an ordinary
                module: a list of paths, or a dict of paths and plans. Returns the same model then.
    opaque      "marked": submodules given to sw.opaque stay as they are; "auto": also the smallest submodules that
                can't be captured, with a warning.
    unbatched   names of the inputs that have no batch dim, such as ["mask"]; without it sizes tell, see docs/data.md.

    Returns the model, or the model and the optimizer (or the list of all that train it), now working on the pieces.
    """
    _check(inputs, outputs, accumulate, reduction)
    _check_batching(microbatches, microbatch_semantics, backward)
    exact = _exact(precision, model, optimizer)
    model = unwrapped(model)
    world, requested = start(timeout=timeout), read_asked(constraints, model, plan)
    check_optimizers(model, several(optimizer), per_replica=inputs == "per_replica" and world.size > 1)
    if parts is not None:
        _check_parts(example, constraints, exact.casts, unbatched)
        replace_parts(model, optimizer, parts, plan, world, inputs, accumulate, seed, Path(directory), opaque)
        return model if optimizer is None else (model, optimizer)
    training = training_of(next(iter(several(optimizer)), None), accumulate, exact)
    options = SearchOptions(memory=read_bytes(memory), constraints=requested)
    setting = _setting(plan, cluster, world, training, options, inputs)
    compiler = Compiler(
        model, optimizer, world, plan, inputs, Path(directory), seed, setting=setting, outputs=outputs,
        batching=Batching(microbatches=microbatches, local=microbatch_semantics == "local"), backward=backward,
        precision=exact, unbatched=unbatched,
    )  # fmt: skip
    compiled = _make_model(model, compiler, example, accumulate, opaque, reduction)
    return compiled if optimizer is None else (compiled, optimizer)


def _setting(
    plan: PlanLike, cluster: str | Path, world: World, training: TrainingSetup, options: SearchOptions, inputs: Mode
) -> PlanningTask | None:
    """What a plan is searched for and priced with; None if nobody asks for either."""
    if plan != "auto" and cluster == "auto":
        return None
    known = cluster_here(world) if cluster == "auto" else find_cluster(cluster)
    return PlanningTask(cluster=known, training=training, options=options, rows=inputs == "per_replica")


def _make_model(
    model: nn.Module, compiler: Compiler, example: Any, accumulate: int, opaque: How, reduction: LossReduction
) -> ParallelModel:
    check_names(model, compiler.call_inputs.unbatched)
    compiler.stated = {"accumulate": accumulate, "reduction": reduction, "opaque": opaque}
    find_opaque(compiler.skeleton, opaque)
    compiled = ParallelModel(compiler.skeleton, compiler.world, compiler, compiler.mode, accumulate, reduction)
    with watch.calling():
        compiler.agree()
    if example is not None:
        compiled.prepare(*arguments_of(example))
    else:
        compiled.show(model)
    return compiled


def _exact(precision: PrecisionLike, model: nn.Module, optimizer: Optimizers) -> Precision:
    requested = read_precision(precision)
    if requested.master and optimizer is None and model.training:
        raise InputError(
            f"precision={precision!r} has float32 masters, which the optimizer updates, and there is none; pass the "
            "optimizer, or call model.eval() before if it is not trained, or say {'base': ..., 'master': False}"
        )
    return requested


def _check(inputs: str, outputs: str, accumulate: int, reduction: str) -> None:
    if inputs not in ("global", "per_replica", "per_rank"):
        raise InputError(f'inputs={inputs!r} is not a mode; use "global", "per_replica" or "per_rank"')
    if outputs not in ("all", "scalars"):
        raise InputError(f'outputs={outputs!r} is not known; use "all" or "scalars"')
    if reduction != "mean" and inputs != "per_replica":
        raise InputError(
            f'reduction={reduction!r} is for inputs="per_replica", where each replica has a loss of its own '
            f"rows; with inputs={inputs!r} every rank sees the outputs of the whole batch, and its loss is that of all"
        )
    if accumulate < 1:
        raise InputError(f"accumulate={accumulate} makes no sense; use 1 to sync at every backward")


def _check_batching(microbatches: int | None, semantics: str, backward: str) -> None:
    if microbatches is not None and microbatches < 1:
        raise InputError(f"microbatches={microbatches} makes no sense; use 1 for no cut")
    if semantics not in ("global", "local"):
        raise InputError(f'microbatch_semantics={semantics!r} is not known; use "global" or "local"')
    if semantics == "local" and microbatches is None:
        raise InputError('microbatch_semantics="local" needs to know how many microbatches there are: microbatches=4')
    if backward not in ("inside", "outside"):
        raise InputError(f'backward={backward!r} is not known; use "inside" or "outside"')


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
            f"unbatched={list(unbatched)}: {type(model).__name__} has no input {', '.join(strange)}; its inputs "
            f"are {', '.join(names)}"
        )


def _check_parts(example: Any, constraints: Any, casts: bool, unbatched: Any) -> None:
    if example is not None:
        raise InputError("parts are compiled at their first call, for what it gives them; leave example out")
    if constraints is not None:
        raise InputError("constraints are for the search over a whole model, not over parts of one; leave them out")
    if unbatched is not None:
        raise InputError("unbatched names inputs of a whole model, not of parts of one; leave it out")
    if casts:
        raise InputError("precision is for a whole model; cast the parts, or use torch.autocast in the model")


def plan(
    model: nn.Module, *, example: Any, plan: PlanLike = "auto", cluster: str | Path | int = "cpu", entry: str = "train",
    memory: str | float | None = None, constraints: ConstraintsLike | None = None, optimizer: str = "adamw",
    precision: PrecisionLike = None, accumulate: int = 1, inputs: Mode = "global", outputs: Outputs = "all",
    opaque: How = "marked", seconds: float | None = None, microbatches: int | None = None,
    progress: Progress | None = None, unbatched: Sequence[str] | None = None,
) -> Plan:  # fmt: skip
    """The plan for a model, without running anything: no processes, no GPU, and meta parameters are fine.

    cluster     a name such as "8xA100-80GB", the path of a cluster file, or a number of CPU processes
    memory      how much of a device's memory it may use, such as "70GiB"; without it, what the device has
    constraints what the search has to keep to: a list of dicts or the path of a YAML file, see docs/constraints.md
    optimizer   the kind whose state counts: "adamw", "sgd", "momentum", ...
    precision   as `parallelize` takes it: "bf16-mixed", "bf16", ...; None: as it is written
    microbatches  how many, in a pipeline; without it, about four a stage, or what "auto" finds
    seconds     how long "auto" searches at most; the plan says if that was not enough
    progress    is called with what is being looked at, and the best time of a step so far
    unbatched   as `parallelize` takes it: inputs that have no batch dim

    What the plan is predicted to cost is in its `predicted`; `explain` shows it.
    """
    result, _ = planned(
        model, example=example, plan=plan, cluster=cluster, entry=entry, memory=memory, optimizer=optimizer,
        precision=precision, accumulate=accumulate, inputs=inputs, outputs=outputs, opaque=opaque, seconds=seconds,
        constraints=constraints, progress=progress, microbatches=microbatches, unbatched=unbatched,
    )  # fmt: skip
    return result


def planned(
    model: nn.Module, *, example: Any, plan: PlanLike, cluster: str | Path | int, size: int | None = None,
    entry: str = "train", memory: str | float | None, optimizer: str, precision: PrecisionLike, accumulate: int,
    inputs: Mode, outputs: Outputs, opaque: How, seconds: float | None, progress: Progress | None,
    constraints: ConstraintsLike | None = None, stop: Callable[[], bool] | None = None,
    microbatches: int | None = None, unbatched: Sequence[str] | None = None,
) -> tuple[Plan, CapturedGraph]:  # fmt: skip
    """A plan as `plan` makes it, and the call that it is for.

    size    for how many devices of the cluster, if not for all
    stop    says when to end the search with the best so far
    """
    exact = read_precision(precision)
    check_names(model, unbatched)
    captured = with_unbatched(captured_graph(model, example, entry=entry, opaque=opaque, precision=exact), unbatched)
    if outputs == "scalars":
        captured = replace(captured, graph=only_scalars(captured.graph))
    count = size or (cluster if isinstance(cluster, int) else cluster_size(cluster, plan))
    setting = PlanningTask(
        cluster=cluster_for(cluster, count),
        training=training_of(optimizer, accumulate, exact),
        options=SearchOptions(
            memory=read_bytes(memory),
            constraints=read_asked(constraints, model, plan),
            stop=stop,
            seconds=math.inf if seconds is None else seconds,
        ),
        rows=inputs == "per_replica",
        progress=progress,
    )
    batching = Batching(microbatches=microbatches)
    analysis = analyse(captured.graph, probing(captured.functions))
    return make_plan(captured.graph, analysis, plan, count, setting, batching), captured


def captured_graph(
    model: nn.Module, example: Any, *, entry: str | None = None, opaque: How = "marked",
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


def read_asked(constraints: ConstraintsLike | None, model: nn.Module, plan: PlanLike) -> Constraints:
    """Constraints on the search of a plan for a model."""
    if constraints is not None and plan != "auto":
        raise InputError(f'constraints are for plan="auto", which searches; plan={plan!r} says what to do')
    modules = model.named_modules(remove_duplicate=False)
    return read_constraints(constraints, {path: type(module).__name__ for path, module in modules})


def read_bytes(text: str | float | None) -> float | None:
    """Bytes as people write them: "70GiB", or a number."""
    try:
        return None if text is None else quantity.read(text, "bytes")
    except ValueError as error:
        raise InputError(f"memory={text!r}: {error}") from error


def cluster_size(cluster: str | Path, plan: PlanLike) -> int:
    """How many devices a name such as "8xA100-80GB" or a cluster file stands for; "cpu" is what the plan says."""
    if isinstance(plan, Plan):
        return plan.size
    total = find_cluster(cluster).size
    if total == 1 and isinstance(plan, str):
        from .plan import parse_plan_string

        return parse_plan_string("single" if plan == "auto" else plan).size if not plan.endswith(".json") else 1
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

"""Our own contenders: the same model, one call of sw.parallelize; and a yardstick for tensor parallelism."""

from collections.abc import Callable

from torch import Tensor

import shardwright as sw
from shardwright.plan import Plan
from shardwright.runtime.collectives import process_group

from .peers import Contender, training_step
from .pipelines import MICROBATCHES
from .workload import Workload, optimizer_of


def ours(plan: str) -> Callable[[Workload], Contender]:
    def build(work: Workload) -> Contender:
        model = work.model()
        pipeline = {"microbatches": MICROBATCHES} if plan.startswith("pp=") else None
        model, optimizer = sw.parallelize(
            model, optimizer_of(model), example=work.batches(1)[0], plan=plan, pipeline=pipeline
        )
        return Contender(
            name=f"shardwright {plan}", step=training_step(model, optimizer, rows=False), plan=described(model.plan),
            predicted=model.plan.predicted.get("train", {}).get("seconds"),
        )  # fmt: skip

    return build


def described(plan: Plan) -> str:
    """What a plan does, in a few words."""
    (first, *_), storage = plan.entries["train"], sorted({type(kind).__name__ for kind in plan.storage.values()})
    words = [" x ".join(f"{axis.name}={axis.size}" for axis in first.mesh.axes), *storage]
    stages = len(plan.entries["train"])
    words += [f"{stages} stages"] if stages > 1 else []
    return ", ".join(words + ([f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []))


def silent_tp(work: Workload) -> Contender:
    """Tensor parallelism that leaves its sums out, and so computes something else: how fast it could be at most."""
    communicating, whole = process_group.all_reduce, ours("tp=2")(work)

    def step(x: Tensor, y: Tensor) -> Tensor:
        process_group.all_reduce = lambda *value: process_group.DONE  # type: ignore[assignment]
        try:
            return whole.step(x, y)
        finally:
            process_group.all_reduce = communicating

    return Contender(name="tp=2, silent", step=step, is_whole=False)

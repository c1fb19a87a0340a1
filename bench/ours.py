"""Our own contenders: the same GPT, one call of sw.parallelize; and a yardstick for tensor parallelism."""

from collections.abc import Callable

from torch import Tensor

import shardwright as sw
from shardwright.runtime.collectives import process_group

from .peers import Contender, training_step
from .workload import Workload, optimizer_of


def ours(plan: str) -> Callable[[Workload], Contender]:
    def build(work: Workload) -> Contender:
        model = work.model()
        model, optimizer = sw.parallelize(model, optimizer_of(model), example=work.batches(1)[0], plan=plan)
        return Contender(name=f"shardwright {plan}", step=training_step(model, optimizer, rows=False))

    return build


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

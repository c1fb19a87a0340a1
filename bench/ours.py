"""Our own contenders: the same GPT, one call of sw.parallelize."""

from collections.abc import Callable

import shardwright as sw

from .peers import Contender, training_step
from .workload import Workload, optimizer_of


def ours(plan: str) -> Callable[[Workload], Contender]:
    def build(work: Workload) -> Contender:
        model = work.model()
        model, optimizer = sw.parallelize(model, optimizer_of(model), example=work.batches(1)[0], plan=plan)
        return Contender(name=f"shardwright {plan}", step=training_step(model, optimizer, rows=False))

    return build

"""Predictions follow a measurement: a stored file, exactly as `calibrate(BRIEF, 2)` wrote it.

It was measured on two cores that share memory, at a load of 18 on them: its collectives are many times slower than on a
quiet machine. So it shows that plans are ordered by what was measured, not how fast such a machine is.
"""

from pathlib import Path

import torch
from examples.gpt import GPT, GPTConfig

import shardwright as sw

MEASURED = Path(__file__).with_name("two_busy_cores.yaml")


def test_data_parallelism_is_predicted_faster_than_zero_2_where_it_was_measured_so():
    torch.manual_seed(0)
    model = GPT(GPTConfig(vocab=256, seq=64, n_layer=2, n_head=4, d=256))
    ids = torch.zeros(4, 64, dtype=torch.int64)

    def predicted(plan: str, cluster: str | Path) -> float:
        plan_made = sw.plan(model, example=(ids, ids), plan=plan, cluster=cluster, compile={"outputs": "scalars"})
        return plan_made.predicted["train"]["seconds"]

    assert predicted("dp=2", MEASURED) < 0.9 * predicted("zero2=2", MEASURED)

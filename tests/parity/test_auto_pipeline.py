"""A model that does not fit a device trains on four: what "auto" finds keeps to the memory, and is as predicted."""

import torch
from bench.memory import measure_case

from shardwright.parallelize import plan
from tests.models.transformer import Transformer, TransformerConfig

LIMIT = 20 * 2**20


def make():
    torch.manual_seed(0)
    idx = torch.randint(256, (16, 65))
    module = Transformer(TransformerConfig(vocab=256, seq=64, d=128, n_layer=8, n_head=4))
    return module, (idx[:, :-1].contiguous(), idx[:, 1:].contiguous()), {}


def peak(rank, saved):
    return measure_case(make, saved).peak


def test_a_model_that_does_not_fit_trains_on_four_ranks_within_the_limit(pools, tmp_path):
    module, args, _ = make()
    alone = plan(module, example=args, plan="single", cluster=1)
    assert alone.predicted["train"]["memory"]["peak"] > 4 * LIMIT
    planned = plan(module, example=args, cluster=4, memory=LIMIT)
    planned.save(tmp_path / "plan.json")
    measured = pools[4].run(peak, str(tmp_path / "plan.json"), timeout=120)
    message = planned.predicted["train"]["memory"]["peak"]
    assert max(measured) < LIMIT
    assert abs(message / max(measured) - 1) < 0.15

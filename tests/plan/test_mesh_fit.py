"""Transient memory belongs to a plan: what one plan needs for a moment is not taken from all others."""

import math
from functools import lru_cache

import torch
import transformers

from shardwright.cluster import find
from shardwright.cost import TrainingSetup
from shardwright.parallelize import captured_graph
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.auto import SearchOptions, search
from shardwright.plan.mesh_fit import ReserveRange
from shardwright.plan.price import price
from shardwright.planning import only_scalars
from shardwright.probe import probing
from shardwright.rules import Analysis, analyse

CLUSTER, TRAINING = find("8xH100"), TrainingSetup()


@lru_cache
def experts() -> Analysis:
    """A Mixtral of two layers, whose experts need more for a moment than all the rest for a step."""
    config = transformers.MixtralConfig(
        vocab_size=1024, hidden_size=512, intermediate_size=1792, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, num_local_experts=8, max_position_embeddings=512, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.MixtralForCausalLM(config)
        ids = torch.zeros(64, 512, dtype=torch.int64)
    captured = captured_graph(model, ((ids,), {"labels": ids, "use_cache": False}), precision="bf16-mixed")
    return analyse(only_scalars(captured.graph), probing(captured.functions))


def test_a_plan_string_that_fits_is_not_faster():
    """The fastest plans need more for their experts than there is; what they need was reserved for all plans."""
    analysis = experts()
    by_hand = price(
        analysis, CLUSTER, TRAINING, build_plan(analysis.graph, parse_plan_string("zero3=8,recompute"), analysis)
    )
    result = search(analysis, CLUSTER, TRAINING, SearchOptions(memory=1.2 * by_hand.memory.peak))
    assert result.best.needs <= result.limit
    assert result.bound <= result.best.time <= by_hand.seconds


def test_the_next_reserve_is_the_wanted_one_or_halfway():
    span = ReserveRange(0.0, 8.0, 1.0)
    assert span.towards(3.0) == 3.0
    assert span.towards(9.0) == span.towards(-math.inf) == 4.0
    span.low = 7.5
    assert span.towards(7.7) is None

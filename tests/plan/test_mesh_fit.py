"""Transient memory belongs to a plan: what one plan needs for a moment is not taken from all others."""

import math
from functools import lru_cache

import numpy as np
import pytest
import torch
import transformers

from shardwright.cluster import find
from shardwright.cost import TrainingSetup
from shardwright.cost.resources import COUNT, Resource
from shardwright.parallelize import captured_graph
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.auto import SearchOptions, search
from shardwright.plan.binder import bind
from shardwright.plan.constraints import Constraints, read_constraints
from shardwright.plan.context import SearchContext
from shardwright.plan.known_splits import known_splits
from shardwright.plan.mesh_fit import ReserveRange
from shardwright.plan.price import price
from shardwright.planning import only_scalars
from shardwright.probe import probing
from shardwright.rules import Analysis, analyse
from tests.plan.properties import Search, draw

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


@pytest.mark.parametrize(
    ("seed", "by_hand"), [(1, "zero3=2,sp=4,recompute"), (21, "sp=8,recompute")], ids=["gathered", "large ops"]
)
def test_what_is_there_for_a_while_counts(seed, by_hand):
    """Nothing was found here, where a plan string fits: units of ZeRO-3 and large ops were not in the sums."""
    drawn = Search(draw(seed))
    limit = drawn.limit
    hand, _, peak = drawn.seconds(by_hand)
    assert peak <= limit
    assert drawn.seconds(memory=limit)[0] <= hand


def test_a_layer_at_a_time_is_recomputed_and_gathered():
    """What a mean layer has for a while is in the sums, once and not for every layer."""
    search = Search(draw(1))
    context = SearchContext(search.analysis, search.cluster, search.training, bind(Constraints(), search.analysis))
    tables = context.tables(context.recomputing, next(iter(context.candidates())))
    assert tables is not None
    used = np.zeros(COUNT)
    used[Resource.KEPT] = 8.0
    again = tables.recomputed(used)
    assert again[Resource.KEPT] == 0.0
    assert again[Resource.PASSING] == 4.0  # of two layers
    options = tables.storage_options[tables.skeleton.variables[tables.homes["layers.0.up.weight"]].kind]
    passing = {store.name: row[Resource.PASSING] for store, row in zip(options.storage, options.used, strict=True)}
    bytes = 256 * 4096 * 2
    assert passing["zero3"] == (2 + 2) * bytes / 2
    assert passing["replicated"] == passing["zero2"] == 0.0


def test_the_splits_of_plan_strings_keep_to_constraints():
    search = Search(draw(1))

    def splits(*entries):
        limits = bind(read_constraints(list(entries)), search.analysis)
        context = SearchContext(search.analysis, search.cluster, search.training, limits)
        return [str(candidate.mesh) for candidate, _ in known_splits(context)]

    assert splits() == ["dp=8", "dp=4 x tp=2", "dp=2 x tp0=2 x tp1=2", "tp0=2 x tp1=4"]
    assert splits({"op": "linear", "replicated": True}) == []
    assert splits({"axis": "dp", "size": 2}) == []
    assert splits(*({"module": "layers.0", "recompute": wanted} for wanted in (True, False))) == []


def test_where_nothing_else_fits_parameters_are_not_gathered():
    """Nothing was found here, and a plan under the constraint that nothing is gathered."""
    drawn = Search(draw(209))
    limit = drawn.limit
    constrained, _, peak = drawn.seconds(memory=limit, constraints=read_constraints([{"zero": 1}]))
    assert peak <= limit
    assert drawn.seconds(memory=limit)[0] <= constrained * 1.011

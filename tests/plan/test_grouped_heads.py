"""The search lets keys and values of grouped heads hand their gradients back as pending sums."""

from shardwright.cluster import find
from shardwright.cost import TrainingSetup
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.auto import SearchOptions, search
from shardwright.plan.op_kinds import OpKinds
from shardwright.plan.price import price
from shardwright.rules import FAN
from tests.plan.properties import analysis_of


def test_the_search_hands_the_gradients_of_shared_keys_back_in_parts_too():
    """With sums of their own for keys and values `auto` was 3.4 % slower than tp=8 here."""
    analysis = analysis_of(("tokens", 1024, 2, 1, 8192, 4096), 1)
    cluster, training = find("8xA100-80GB"), TrainingSetup(compute="bfloat16")
    by_hand = price(analysis, cluster, training, build_plan(analysis.graph, parse_plan_string("tp=8"), analysis))

    result = search(analysis, cluster, training, SearchOptions())

    assert result.best.time <= by_hand.seconds
    choices = result.plan.choices("train")
    for op in ("k / linear", "v / linear", "k / bias"):
        assert FAN in choices[f"layers.0.{op}"].values()
    assert FAN not in choices["layers.0.q / linear"].values()


def test_keys_are_grouped_where_their_heads_are_fewer_than_those_of_queries():
    def grouped(heads):
        return OpKinds(analysis_of(("tokens", 256, 1, heads, 512, 512), 8), TrainingSetup()).grouped

    assert grouped(8) == {}
    shared = grouped(2)
    assert set(shared.values()) == {2}
    assert {"layers.0.k / linear", "layers.0.k / bias", "layers.0.v / linear"} <= set(shared)
    assert not {"layers.0.q / linear", "layers.0.norm / layer_norm", "layers.0 / scaled_dot_product_attention"} & set(
        shared
    )

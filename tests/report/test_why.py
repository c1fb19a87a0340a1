"""Why an op is split the way it is: every other way is priced as a plan with that change is."""

import dataclasses
import re

import pytest

from shardwright.capture import capture
from shardwright.cluster import find
from shardwright.compile import copy_to_meta
from shardwright.cost import TrainingSetup
from shardwright.errors import InputError, PlanError
from shardwright.layout import Axis, Mesh
from shardwright.parallelize import plan as make_plan
from shardwright.plan.builder import PlanBuilder
from shardwright.plan.price import price
from shardwright.report import explain, read_plan
from shardwright.rules import analyse
from tests.models.zoo import ZOO
from tests.report.llama import llama

CLUSTER = "4xA100-80GB"
OP = "model.layers.1.mlp.up_proj / linear"
EVERY = "model.layers.*.mlp.up_proj / linear"
SMALL = "blocks.1.up / linear"


@pytest.fixture(scope="module")
def gpt():
    module, args, kwargs = ZOO["gpt"]()
    return module, (args, kwargs), capture(copy_to_meta(module), args, kwargs).graph


@pytest.fixture(scope="module")
def large():
    module, example = llama()
    return module, example, capture(copy_to_meta(module), *example).graph


@pytest.fixture(scope="module")
def auto(large):
    return make_plan(large[0], example=large[1], cluster="2xA100-80GB")


def seconds_with(plan, graph, op, choice):
    """The price of the plan with another choice for one op."""
    stage = plan.entries["train"][0]
    other = dataclasses.replace(stage, choices={**stage.choices, op: choice})
    actual = price(
        analyse(graph), find(CLUSTER), TrainingSetup(), dataclasses.replace(plan, entries={"train": (other,)})
    )
    return actual.seconds, actual.memory.peak


def test_every_way_costs_what_a_plan_with_it_costs(gpt):
    module, example, graph = gpt
    plan = make_plan(module, example=example, plan="zero2=2,tp=2,recompute", cluster=CLUSTER)
    why = explain(plan, graph, op=SMALL)

    assert len(why.ways) > 12
    assert why.chosen.seconds == pytest.approx(plan.predicted["train"]["seconds"], rel=1e-3)
    for way in why.ways[::3]:
        seconds, memory = seconds_with(plan, graph, SMALL, way.choice)
        assert way.seconds == pytest.approx(seconds, rel=1e-9)
        assert way.memory == pytest.approx(memory)


def test_what_was_found_is_the_best_and_others_that_follow_never_cost_more(large, auto):
    why = explain(auto, large[2], op=OP)
    assert why.chosen is why.ways[0]
    assert why.chosen.choice
    gap = 1 + auto.predicted["train"]["gap"] + 1e-9
    for way in why.ways:
        assert way.follow <= way.seconds * 1.0006
        assert way.follow * gap >= why.chosen.seconds
    assert [way.seconds for way in why.ways] == sorted(way.seconds for way in why.ways)


def test_a_poor_choice_is_told_apart(gpt):
    module, example, graph = gpt
    plan = make_plan(module, example=example, plan="tp=4", cluster=CLUSTER)
    assert min(way.follow for way in explain(plan, graph, op=SMALL).ways) < plan.predicted["train"]["seconds"]


def test_the_op_of_all_layers_changes_together(large, auto):
    _, _, graph = large
    first, both = explain(auto, graph, op=OP), explain(auto, graph, op=EVERY)
    assert len(both.query.ops) == 2
    worst = max(first.ways, key=lambda way: way.seconds)
    same = next(way for way in both.ways if way.choice == worst.choice)
    assert same.seconds > worst.seconds
    assert f"{EVERY}, 2 times" in str(both)


def test_a_plan_file_read_without_its_model_will_do(large, auto, tmp_path):
    auto.save(tmp_path / "plan.json")
    why = explain(read_plan(tmp_path / "plan.json"), large[2], op=OP)
    assert str(why) == str(explain(auto, large[2], op=OP))


def test_the_table_marks_what_is_planned(large, auto):
    (line,) = [line for line in str(explain(auto, large[2], op=OP)).splitlines() if line.startswith("*  ")]
    shown = float(re.search(r"([\d.]+) ms", line)[1])
    assert shown == pytest.approx(1e3 * auto.predicted["train"]["seconds"], rel=1e-3)  # which the file rounds
    assert "%" not in line


def test_what_can_not_be_asked(large, auto):
    graph = large[2]
    with pytest.raises(PlanError, match=r"no op is named 'model.layers.0.upp / linear'"):
        explain(auto, graph, op="model.layers.0.upp / linear")
    with pytest.raises(PlanError, match=r"there are model.layers.\*.mlp.up_proj / linear"):
        explain(auto, graph, op="model.layers.0.mlp.up_proj")
    with pytest.raises(InputError, match="needs the graph of the model"):
        explain(auto, op=OP)
    with pytest.raises(PlanError, match="pass its file as cluster="):
        explain(dataclasses.replace(auto, cluster="lab", predicted={}), graph, op=OP)
    mixed = dataclasses.replace(auto.entries["train"][0], choices={**auto.entries["train"][0].choices, OP: {}})
    with pytest.raises(PlanError, match="are split in 2 ways"):
        explain(dataclasses.replace(auto, entries={"train": (mixed,)}), graph, op=EVERY)


def test_an_axis_between_nodes_is_asked_too(gpt):
    """On three axes the search splits the batch only on the first; the asked op may do all it can there."""
    module, example, graph = gpt
    plan = make_plan(module, example=example, plan=three_axes, cluster="2x4xA100-80GB")
    why = explain(plan, graph, op=SMALL)
    best = min(why.ways, key=lambda way: way.follow)
    odd = [way for way in why.ways if way.choice.get("dp") == "n"]
    assert odd
    assert all(way.follow > best.follow for way in odd)


def three_axes(graph, cluster):
    mesh = Mesh(axes=tuple(Axis(name=name, size=2) for name in ("dp", "dp2", "tp")))
    assert mesh.size == cluster.size
    return PlanBuilder(graph, mesh).finish("three")

"""Plans as files: what is written is read back, folded where layers are alike, refused where it does not fit."""

from __future__ import annotations

import json

import pytest

from shardwright.errors import PlanError
from shardwright.plan import PlanBuilder, build_plan, parse_plan_string
from shardwright.plan.file import load
from shardwright.plan.folding import fold, unfold
from tests.layout.drawn import mesh_of
from tests.plan.graphs import facts_of, graph_of


def plan_of(text: str, name: str = "gpt"):
    return build_plan(graph_of(name), parse_plan_string(text), facts_of(name))


@pytest.mark.parametrize("text", ["dp=2", "tp=2", "sp=2", "zero3=2,tp=2"])
def test_a_plan_that_is_saved_and_loaded_is_the_same_plan(tmp_path, text):
    plan = plan_of(text)

    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json", graph_of("gpt"))

    assert again == plan
    assert again.name == plan.name
    assert list(tmp_path.iterdir()) == [tmp_path / "plan.json"], "no draft is left behind"


def test_layers_that_are_alike_are_said_once():
    data = json.loads(plan_of("tp=2").to_json())
    choices = data["entries"]["train"][0]["choices"]

    assert choices["blocks.*.up / linear"] == {"tp": "n"}
    assert not any(key.startswith("blocks.0") for key in choices)


def test_the_file_is_the_same_text_every_time():
    assert plan_of("dp=2,tp=2").to_json() == plan_of("dp=2,tp=2").to_json()


def test_folding_and_unfolding_are_inverse_where_layers_differ():
    names = [f"blocks.{i}.{part}" for i in range(3) for part in ("up", "down")]
    choices = {name: {"tp": "n"} for name in names} | {"blocks.1.up": {"tp": "k"}}

    folded = fold(choices)

    assert folded["blocks.*.down"] == {"tp": "n"}
    assert folded["blocks.1.up"] == {"tp": "k"}
    assert unfold(folded, names) == choices


def test_a_layer_that_is_left_alone_stays_alone_after_a_round_trip(tmp_path):
    """Only the first block is split: a star would split the second one too."""
    analysis = facts_of("gpt")
    builder = PlanBuilder(graph_of("gpt"), mesh_of(tp=2), analysis)
    op = next(op for op in builder.ops if op.name == "blocks.0.up / linear")
    builder.split(op, builder.mesh.axes[0], next(role for role in builder.roles(op) if role.name == "n"))
    plan = builder.finish("mine")

    plan.save(tmp_path / "plan.json")

    assert load(tmp_path / "plan.json", graph_of("gpt")).choices("train") == plan.choices("train")


def test_a_plan_for_another_graph_says_what_the_model_lacks(tmp_path):
    plan_of("dp=2").save(tmp_path / "plan.json")

    with pytest.raises(PlanError, match=r"made for another graph of .*fingerprint .*make a new plan") as error:
        load(tmp_path / "plan.json", graph_of("rotary"))

    assert "the plan splits wpe / embedding, which the model does not have" in str(error.value)
    assert "qkv" not in str(error.value), "what both have is not named"


def test_a_name_that_nothing_has_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    plan_of("tp=2").save(path)
    data = json.loads(path.read_text())
    data["entries"]["train"][0]["choices"]["blocks.*.sideways / linear"] = {"tp": "n"}
    path.write_text(json.dumps(data))

    with pytest.raises(PlanError, match=r"'blocks\.\*\.sideways / linear' names nothing in the model"):
        load(path, graph_of("gpt"))


def test_every_fault_of_a_file_is_named_at_once(tmp_path):
    path = tmp_path / "plan.json"
    plan_of("tp=2").save(path)
    data = json.loads(path.read_text())
    data |= {"version": 99, "mesh": {"tp": 0}, "notes": "none", "colour": "red", "entries": {"train": {}}}
    del data["storage"]
    path.write_text(json.dumps(data))

    with pytest.raises(PlanError) as error:
        load(path, graph_of("gpt"))

    message = str(error.value)
    for fault in ("storage is missing", "colour is unknown", "notes should be a list", "version should be 1, is 99"):
        assert fault in message
    assert "mesh.tp should be a whole number from 1 to 131072, is 0" in message
    assert "entries.train" in message


@pytest.mark.parametrize(("text", "why"), [("{", "is not JSON"), ("[]", "should be an object")])
def test_what_is_no_plan_at_all_is_refused(tmp_path, text, why):
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(PlanError, match=why):
        load(path, graph_of("gpt"))

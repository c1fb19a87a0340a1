"""Plan files read without their model, and two plans compared."""

import dataclasses
import json

import pytest

from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.errors import PlanError
from shardwright.parallelize import plan as make_plan
from shardwright.plan import PlanStage
from shardwright.report import diff, explain, read_plan
from shardwright.report.difference import TotalDifference
from tests.models.zoo import ZOO


@pytest.fixture(scope="module")
def plans():
    module, args, kwargs = ZOO["gpt"]()
    return {text: make_plan(module, example=(args, kwargs), plan=text) for text in ("tp=2", "zero2=2")}


def with_choice(plan, name, choice):
    choices = {**plan.choices("train"), name: choice}
    return dataclasses.replace(plan, entries={"train": (PlanStage(mesh=plan.mesh, choices=choices),)})


def test_a_plan_does_not_differ_from_its_file(plans, tmp_path):
    plans["tp=2"].save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")

    assert not diff(plans["tp=2"], read)
    assert str(diff(plans["tp=2"], read)) == "the plans make the same decisions"
    assert "blocks.*.attn.qkv" in str(explain(read, full=True))


def test_a_plan_read_without_its_model_is_written_as_it_was(plans, tmp_path):
    odd = with_choice(plans["tp=2"], "blocks.0.up / linear", {})  # so that the file names blocks.1.up alone
    odd.save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")

    assert "blocks.1.up / linear" in read.choices("train")
    assert read.to_json() == odd.to_json()
    assert read.name == odd.name


def test_one_op_that_is_split_otherwise_is_named(plans):
    changed = with_choice(plans["tp=2"], "blocks.1.up / linear", {})
    (row,) = diff(plans["tp=2"], changed).rows

    assert (row.what, row.name, row.a, row.b) == ("train", "blocks.1.up / linear", "tp: n", "replicated")


def test_ops_that_differ_alike_are_said_with_a_star(plans):
    difference = diff(plans["tp=2"], plans["zero2=2"])
    message = {(row.what, row.name): (row.a, row.b) for row in difference.rows}

    assert message["mesh", ""] == ("tp=2", "dp=2")
    assert message["train", "blocks.*.down / linear"] == ("tp: k", "dp: ma")
    assert message["storage", "wte.weight"] == ("replicated", "ZeRO-2 over dp")
    assert "ZeRO-2 over dp" in str(difference)


def test_what_two_plans_cost_is_compared(plans):
    by_key = {total.what: (total.a, total.b) for total in diff(plans["tp=2"], plans["zero2=2"]).totals}
    message = [plans[text].predicted["train"] for text in ("tp=2", "zero2=2")]

    assert by_key["step time"] == tuple(part["seconds"] for part in message)
    assert by_key["blocking communication"] == tuple(part["blocking"] for part in message)
    assert by_key["memory, optimizer"] == tuple(part["memory"]["optimizer"] for part in message)
    assert not diff(plans["tp=2"], dataclasses.replace(plans["zero2=2"], predicted={})).totals


def test_other_terms_are_said():
    module, args, kwargs = ZOO["gpt"]()
    first, other = (
        make_plan(module, example=(args, kwargs), plan="tp=2", optimizer=optimizer) for optimizer in ("adamw", "sgd")
    )
    (row,) = diff(first, other).rows
    assert (row.what, row.name, row.a, row.b) == ("priced for", "optimizer", "adamw", "sgd")


def test_a_difference_in_one_part_costs_all_of_the_difference():
    module, args, kwargs = ZOO["gpt"]()
    graph = capture(copy_to_meta(module), args, kwargs).graph
    options = {"example": (args, kwargs), "cluster": "2xA100-80GB"}
    plans = [make_plan(module, plan=text, **options) for text in ("dp=2", "zero2=2")]
    mixed = dataclasses.replace(plans[0], storage={key: plans[1].storage[key] for key in ["wte.weight"]})
    (part,) = diff(plans[0], mixed, graph).parts
    assert (part.name, part.ops, part.stored) == ("wte", 0, 1)

    every = diff(*plans, graph).parts
    assert {part.name for part in every} >= {"wte", "blocks.*.attn", "blocks.*.up"}
    assert next(value for value in every if value.name == "wte") == part
    total = plans[1].predicted["train"]["seconds"] - plans[0].predicted["train"]["seconds"]
    assert sum(part.seconds for part in every) == pytest.approx(total, rel=0.01)  # storages do not touch each other


def test_recomputing_is_a_part(plans):
    module, args, kwargs = ZOO["gpt"]()
    graph = capture(copy_to_meta(module), args, kwargs).graph
    again = make_plan(module, example=(args, kwargs), plan="tp=2,recompute")
    (part,) = diff(plans["tp=2"], again, graph).parts
    assert part.name == "recomputation"
    assert part.seconds > 0 > part.memory


def test_parts_of_plans_on_different_meshes_have_no_cost(plans):
    module, args, kwargs = ZOO["gpt"]()
    graph = capture(copy_to_meta(module), args, kwargs).graph
    difference = diff(plans["tp=2"], plans["zero2=2"], graph)
    assert not difference.parts
    assert "the meshes differ" in str(difference)


def test_files_that_are_no_plans_are_refused(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(PlanError, match="is not JSON"):
        read_plan(tmp_path / "text.json")
    (tmp_path / "empty.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(PlanError, match="mesh is missing"):
        read_plan(tmp_path / "empty.json")


def test_a_difference_to_a_rounding_error_has_no_percentage(plans):
    total = TotalDifference(what="exposed", a=1e-19, b=2.5e-4)
    difference = dataclasses.replace(diff(plans["tp=2"], plans["zero2=2"]), totals=(total,))
    (line,) = [line for line in str(difference).splitlines() if "exposed" in line]
    assert "%" not in line and "250 us" in line


def test_a_plan_of_stages_read_without_its_model_is_written_as_it_was(tmp_path):
    module, args, kwargs = ZOO["gpt"]()
    plan = make_plan(module, example=(args, kwargs), plan="pp=2,tp=2")
    plan.save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")

    assert read.to_json() == plan.to_json()
    assert read.name == plan.name
    assert "stage 1 of 2" in str(explain(read, capture(copy_to_meta(module), args, kwargs).graph))

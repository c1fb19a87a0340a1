"""Plan files read without their model, and two plans compared."""

import dataclasses
import json

import pytest

from shardwright.errors import PlanError
from shardwright.parallelize import plan as make_plan
from shardwright.plan import Segment
from shardwright.report import diff, explain, read_plan
from tests.models.zoo import ZOO


@pytest.fixture(scope="module")
def plans():
    module, args, kwargs = ZOO["gpt"]()
    return {text: make_plan(module, example=(args, kwargs), plan=text) for text in ("tp=2", "zero2=2")}


def with_choice(plan, name, choice):
    choices = {**plan.choices("train"), name: choice}
    return dataclasses.replace(plan, entries={"train": (Segment(mesh=plan.mesh, choices=choices),)})


def test_a_plan_does_not_differ_from_its_file(plans, tmp_path):
    plans["tp=2"].save(tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")

    assert not diff(plans["tp=2"], read)
    assert str(diff(plans["tp=2"], read)) == "the plans decide the same"
    assert "blocks.*.attn.qkv" in str(explain(read, full=True))


def test_one_op_that_is_split_otherwise_is_named(plans):
    changed = with_choice(plans["tp=2"], "blocks.1.up / linear", {})
    (row,) = diff(plans["tp=2"], changed).rows

    assert (row.what, row.name, row.a, row.b) == ("train", "blocks.1.up / linear", "tp: n", "whole")


def test_ops_that_differ_alike_are_said_with_a_star(plans):
    found = diff(plans["tp=2"], plans["zero2=2"])
    said = {(row.what, row.name): (row.a, row.b) for row in found.rows}

    assert said["mesh", ""] == ("tp=2", "dp=2")
    assert said["train", "blocks.*.down / linear"] == ("tp: k", "dp: ma")
    assert said["storage", "wte.weight"] == ("whole", "ZeRO-2 over dp")
    assert "ZeRO-2 over dp" in str(found)


def test_files_that_are_no_plans_are_refused(tmp_path):
    with pytest.raises(PlanError, match="No such file"):
        read_plan(tmp_path / "none.json")
    (tmp_path / "text.json").write_text("not json")
    with pytest.raises(PlanError, match="is not JSON"):
        read_plan(tmp_path / "text.json")
    (tmp_path / "empty.json").write_text(json.dumps({"version": 1}))
    with pytest.raises(PlanError, match="'mesh' is missing"):
        read_plan(tmp_path / "empty.json")

"""What a plan file says of a pipeline: it is read back as it was, and explained on one screen."""

from dataclasses import replace

import pytest

import shardwright as sw
from shardwright.cluster import find
from shardwright.plan.auto import SearchOptions
from shardwright.plan.constraints import read_constraints
from shardwright.plan.file import load
from shardwright.plan.joint import find_plan as find_joint
from shardwright.plan.joint import predicted
from shardwright.report.text import format_time

from .models import language
from .test_planner import MIXED


@pytest.fixture(scope="module")
def plan():
    analysis, cluster = language(layers=4), find("4xA100-80GB")
    constraints = read_constraints([{"stages": 4}, {"microbatches": 8}, {"schedule": "1f1b"}])
    result = find_joint(analysis, cluster, MIXED, SearchOptions(constraints=constraints))
    return replace(result.plan, predicted={"train": predicted(result, cluster, MIXED, analysis)})


def test_a_plan_that_is_saved_and_loaded_is_the_same(plan, tmp_path):
    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json", language(layers=4).graph)
    assert again.entries == plan.entries and again.storage == plan.storage
    assert (again.microbatches, again.schedule) == (8, "1f1b")


def test_one_screen_has_the_picture_the_stages_and_what_almost_won(plan):
    screen = str(sw.explain(plan))
    assert len(screen.splitlines()) <= 45
    assert "4 pipeline ranks, schedule 1f1b" in screen and "bubble" in screen and "longer than the mean" in screen
    assert "1f1b (4 stages, 4 devices, 8 microbatches)" in screen
    assert "blocks.0" in screen and "memory" in screen


def test_times_add_up(plan):
    prediction = plan.predicted["train"]
    parts = sum(prediction[kind] for kind in ("compute", "blocking", "exposed", "bubble", "update"))
    assert parts == pytest.approx(prediction["seconds"], rel=2e-3)
    kinds = [size for kind, size in prediction["memory"].items() if kind != "peak"]
    assert sum(kinds) == pytest.approx(prediction["memory"]["peak"], abs=8)


def test_the_screen_says_how_far_a_pipeline_can_be_from_the_best(plan):
    prediction = plan.predicted["train"]
    assert 0.0 < prediction["bound"] <= prediction["seconds"]
    assert prediction["gap"] == pytest.approx(prediction["seconds"] / prediction["bound"] - 1, abs=2e-3)
    words = f"nothing in the search space takes less than {format_time(prediction['bound'])} (gap"
    assert words in " ".join(str(sw.explain(plan)).split())

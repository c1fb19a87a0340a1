"""People may say what a pipeline is like, and are told what can't be."""

import pytest

from shardwright.cluster import find
from shardwright.cost import TrainingSetup
from shardwright.errors import PlanError
from shardwright.plan.auto import SearchOptions
from shardwright.plan.constraints import read_constraints
from shardwright.plan.joint import find_plan as find_joint

from .models import chain, language

CLASSES = {"": "Chain", "layers": "ModuleList", **{f"layers.{n}": "Sequential" for n in range(8)}}


def search(*entries, analysis=None, size=4, **options):
    constraints = read_constraints(list(entries), CLASSES)
    return find_joint(
        analysis or chain(),
        find(f"{size}xA100-80GB"),
        TrainingSetup(),
        SearchOptions(constraints=constraints, **options),
    )


def firsts(plan):
    """The first module of each stage."""
    return [next(iter(stage.choices)).partition(" / ")[0] for stage in plan.stages]


def test_stages_microbatches_and_schedule():
    plan = search({"stages": 2}, {"microbatches": 4}, {"schedule": "1f1b"}).plan
    assert len(plan.stages) == 2 and plan.microbatches == 4 and plan.schedule == "1f1b"
    assert "keeps to constraints, entry 1: {stages: 2}" in plan.notes


def test_one_stage_is_no_pipeline():
    assert not search({"stages": 1}, {"microbatches": 1}).plan.is_pipeline


def test_microbatches_may_be_an_argument():
    assert search({"stages": 2}, microbatches=8).plan.microbatches == 8
    with pytest.raises(PlanError, match="leave one of them out"):
        search({"microbatches": 4}, microbatches=8)


def test_stages_begin_where_people_say():
    plan = search({"stages": 2}, {"schedule": "1f1b"}, {"module": "layers.3", "cut": "before"}).plan
    assert firsts(plan)[1].startswith("layers.3.")


def test_modules_stay_whole():
    plan = search(
        {"stages": 2}, {"schedule": "1f1b"}, {"module": [f"layers.{n}" for n in range(8)], "cut": "never"}
    ).plan
    names = [{name.partition(" / ")[0].rpartition(".")[0] for name in stage.choices} for stage in plan.stages]
    assert not names[0] & names[1] - {""}


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ([{"stages": 5}], "5 stages are asked for, and there are 4 devices"),
        ([{"microbatches": 3}], "a batch of 4096 does not divide into 3 microbatches"),
        ([{"microbatches": 8192}], "8192 microbatches are more than the batch has samples"),
        ([{"stages": 0}], "is no number of stages"),
        ([{"schedule": "2f2b"}], "there is no schedule '2f2b'"),
        ([{"stages": 2}, {"stages": 3}], "another entry asks for stages: 2"),
        ([{"module": "layers.9", "cut": "before"}], "the model has no module 'layers.9'"),
        ([{"cut": "before"}], "say by module or class where a stage begins"),
        ([{"module": "layers.3", "cut": "after"}], "cut is before or never"),
        ([{"stages": 2}, {"memory": "1MiB"}], "no pipeline with 2 stages was found that fits"),
    ],
)
def test_what_cannot_be_is_said(entries, message):
    with pytest.raises(PlanError, match=message):
        search(*entries)


def test_more_stages_than_the_model_has_parts():
    with pytest.raises(PlanError, match="can be cut"):
        search({"stages": 4}, analysis=chain(layers=1))


def test_axes_are_those_that_are_named():
    plan = search({"stages": 2}, {"axis": "tp", "size": 2}, analysis=language(layers=4)).plan
    assert all(stage.mesh.sizes == {"tp": 2} for stage in plan.stages)

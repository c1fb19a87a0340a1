"""Plans with stages or microbatches are priced, whoever made them, and their numbers add up."""

import io
import re

import pytest
from rich.console import Console

import shardwright as sw
from shardwright import planning
from shardwright.errors import InputError
from shardwright.parallelize import plan as make_plan
from shardwright.report import diff, explain, read_plan
from tests.models.zoo import ZOO
from tests.plan.graphs import graph_of

CLUSTER = "4xA100-80GB"
SCALARS = sw.CompileOptions(outputs="scalars")
NEAR = {"rel": 2e-3, "abs": 1e-9}  # numbers in a plan file have four digits


def gpt_plan(plan, cluster=CLUSTER, microbatches=None, **options):
    module, args, kwargs = ZOO["gpt"]()
    pipeline = sw.PipelineOptions(microbatches=microbatches)
    return make_plan(
        module, example=(args, kwargs), plan=plan, cluster=cluster, compile=SCALARS, pipeline=pipeline, **options
    )


STRINGS = [("pp=2,dp=2", 2), ("pp=4", 4), ("pp=2,tp=2,zb", 4), ("zero3=2,tp=2", 2), ("pp=2,zero1=2,recompute", 2)]


@pytest.fixture(scope="module", params=STRINGS, ids=[name for name, _ in STRINGS])
def plan(request):
    name, microbatches = request.param
    return gpt_plan(name, microbatches=microbatches)


def test_the_parts_of_a_step_add_up(plan):
    predicted = plan.predicted["train"]
    kinds = ("compute", "blocking", "exposed", "bubble", "update")
    assert sum(predicted[kind] for kind in kinds) == pytest.approx(predicted["seconds"], **NEAR)
    in_stages = [sent for sent in predicted["sent"] if sent["collective"] != "send" and sent["when"] != "update"]
    blocking = sum(sent["seconds"] for sent in in_stages if not sent["overlapped"])
    exposed = sum(sent["seconds"] - sent["hidden"] for sent in in_stages if sent["overlapped"])
    assert blocking == pytest.approx(predicted["blocking"], **NEAR)
    assert exposed == pytest.approx(predicted["exposed"], **NEAR)
    memory = predicted["memory"]
    assert sum(size for kind, size in memory.items() if kind != "peak") == pytest.approx(memory["peak"], abs=8)


def test_stages_make_up_the_time_of_a_mean_device(plan):
    predicted = plan.predicted["train"]
    stages = predicted["pipeline"]["stages"]
    ranks = len({stage["devices"] for stage in stages})
    busy = plan.microbatches * sum(stage["forward"] + stage["backward"] for stage in stages) / ranks
    parts = predicted["compute"] + predicted["blocking"] + predicted["exposed"]
    assert busy == pytest.approx(parts, **NEAR)
    assert sum(op["seconds"] for op in predicted["ops"]) <= predicted["compute"] + predicted["blocking"]


def test_the_screen_shows_links_communication_and_ops_in_80_columns(plan):
    text = " ".join(str(explain(plan)).split())
    assert "most expensive ops" in text
    assert "communication over how" in text
    assert "tokens/s" in text
    assert "headroom" in text
    if len(plan.stages) == 1:
        assert "gradient accumulation over 2 microbatches" in text
        assert "1 stage" not in text
        assert "pipeline" not in text
    else:
        assert "stages of the model, nvlink-3" in text


@pytest.mark.parametrize(("plan", "microbatches"), [("pp=4", 4), ("dp=2,tp=2", None), ("zero3=2,tp=2", 2)])
def test_a_terminal_of_80_columns_shows_all_of_it(plan, microbatches):
    """Text and tables fit themselves to it, and the picture of a schedule is no wider."""
    lines = str(explain(gpt_plan(plan, microbatches=microbatches))).splitlines()
    rows = [line for line in lines if re.match(r"[0-9]+ +[|]", line)]
    assert max(map(len, rows), default=0) <= 80
    assert len(rows) == (4 if plan.startswith("pp") else 0)
    narrow = io.StringIO()
    Console(file=narrow, width=80).print(explain(gpt_plan(plan, microbatches=microbatches)))
    shown = narrow.getvalue()
    assert max(map(len, shown.splitlines())) <= 80
    assert "\N{HORIZONTAL ELLIPSIS}" not in shown, "nothing is cut off"


@pytest.mark.parametrize(
    "constraints", [[{"stages": 2}], [{"stages": 4}, {"schedule": "interleaved=2"}]], ids=["two", "interleaved"]
)
def test_what_the_search_finds_costs_what_the_search_says(constraints, monkeypatch):
    results, predicted = [], planning.predicted

    def recorded(outcome, *more):
        results.append(outcome)
        return predicted(outcome, *more)

    monkeypatch.setattr(planning, "predicted", recorded)
    plan = gpt_plan("auto", constraints=constraints)
    (outcome,) = results
    assert plan.predicted["train"]["seconds"] == pytest.approx(outcome.seconds, rel=0.01)
    for stage, cost in zip(plan.predicted["train"]["pipeline"]["stages"], outcome.pipeline.trial.parts, strict=True):
        assert stage["forward"] == pytest.approx(cost.forward, rel=0.02)
        assert stage["backward"] == pytest.approx(cost.backward, rel=0.02)


def test_a_pipeline_from_a_file_is_priced_for_the_cluster_that_is_asked_for(tmp_path):
    slow = gpt_plan("pp=2,dp=2", "4xV100-32GB")
    slow.save(tmp_path / "plan.json")
    module, args, kwargs = ZOO["gpt"]()
    again = make_plan(
        module, example=(args, kwargs), plan=tmp_path / "plan.json", cluster="2x2xH100", compile=SCALARS,
        pipeline=sw.PipelineOptions(microbatches=slow.microbatches),
    )  # fmt: skip
    assert again.predicted["train"]["for"]["cluster"] == "2x2xH100"
    assert again.predicted["train"]["seconds"] == gpt_plan("pp=2,dp=2", "2x2xH100").predicted["train"]["seconds"]
    assert read_plan(tmp_path / "plan.json").predicted["train"]["for"]["cluster"] == "4xV100-32GB"


def test_slower_links_between_stages_take_longer():
    clusters = ("2xA100-80GB", "2x1xA100-80GB@ethernet-1")
    near, far = (gpt_plan("pp=2", cluster).predicted["train"] for cluster in clusters)
    assert far["seconds"] > near["seconds"]
    assert far["compute"] == near["compute"]
    assert far["pipeline"]["links"] == ["ethernet-1"]


@pytest.fixture(scope="module")
def two_stages():
    return gpt_plan("pp=2,tp=2", microbatches=2), graph_of("gpt")


def test_every_stage_is_explained(two_stages):
    plan, graph = two_stages
    text = str(explain(plan, graph))
    assert "stage 0 of 2, mesh tp=2; numbers of a microbatch" in text
    assert "stage 1 of 2" in text
    assert not {"mb", "mb,", "(mb:", "[mb,"} & set(text.split())


def test_explaining_on_another_cluster_prices_anew(two_stages):
    plan, graph = two_stages
    elsewhere = explain(plan, graph, cluster="2x2xV100-32GB@ethernet-1").plan
    assert elsewhere.predicted["train"]["seconds"] != plan.predicted["train"]["seconds"]
    assert elsewhere.predicted["train"]["for"]["cluster"] == elsewhere.cluster == "2x2xV100-32GB@ethernet-1"
    with pytest.raises(InputError, match="needs the graph"):
        explain(plan, cluster="2x2xV100-32GB@ethernet-1")


def test_alternatives_of_an_op_are_priced_as_the_pipeline_that_they_make(two_stages):
    plan, graph = two_stages
    why = explain(plan, graph, op="blocks.0.up / linear")
    assert why.chosen.seconds == pytest.approx(plan.predicted["train"]["seconds"], rel=1e-3)
    assert len([way for way in why.ways if way.seconds < float("inf")]) > 1
    assert "others follow" not in str(why)


def test_parts_of_two_pipelines_are_priced_as_pipelines(two_stages):
    plan, graph = two_stages
    again = gpt_plan("pp=2,tp=2,recompute", microbatches=2)
    difference = diff(plan, again, graph)
    (part,) = difference.parts
    assert part.name == "recomputation"
    change = again.predicted["train"]["seconds"] - plan.predicted["train"]["seconds"]
    assert part.seconds == pytest.approx(change, rel=0.01)
    assert "bubble and sends" in str(difference)
    other = diff(plan, gpt_plan("pp=4", microbatches=2), graph)
    assert other.why_not.startswith("the stages differ")

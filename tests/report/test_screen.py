"""What a plan costs, on one screen, from its file alone."""

import dataclasses
import json

import pytest

from shardwright.parallelize import plan as make_plan
from shardwright.report import explain, read_plan
from shardwright.report.screen import format_time, in_ranges
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.report.llama import llama


@pytest.fixture(scope="module")
def auto():
    module, example = llama()
    options = {"cluster": "2x4xA100-80GB", "precision": "bf16-mixed", "memory": "10GiB", "outputs": "scalars"}
    return make_plan(module, example=example, **grouped(**options))


def changed(plan, **message):
    return dataclasses.replace(plan, predicted={"train": {**plan.predicted["train"], **message}})


def line_with(plan, words):
    text = " ".join(str(explain(plan)).split())
    assert words in text, text


def test_it_is_one_screen(auto):
    lines = str(explain(auto)).splitlines()
    assert len(lines) <= 45
    assert max(map(len, lines)) <= 120


def test_the_file_alone_shows_the_same(auto, tmp_path):
    auto.save(tmp_path / "plan.json")
    assert str(explain(read_plan(tmp_path / "plan.json"))) == str(explain(auto))


def test_what_it_is_for_is_said(auto):
    line_with(auto, "8 devices of 2x4xA100-80GB; batch 8, adamw, in bf16-mixed")
    line_with(auto, "of the limit of 10.0 GiB")


def test_the_numbers_are_those_of_the_file(auto):
    message = auto.predicted["train"]
    line_with(
        auto,
        f"predicted step time {format_time(message['seconds'])}; nothing without stages or microbatches "
        "takes less than",
    )
    line_with(auto, f"compute {format_time(message['compute'])} (")
    line_with(auto, f"blocking communication {format_time(message['blocking'])} (")
    for op in message["ops"]:
        line_with(auto, f"{op['name']} {op['count']} {format_time(op['seconds'])}")
    for edge in message["edges"]:
        line_with(auto, f"{edge['sends']} {edge['count']} {format_time(edge['seconds'])}")


def test_links_are_named(auto):
    links = {link for use in auto.predicted["train"]["axes"] for link in use["links"]}
    assert any("infiniband" in link for link in links)
    for link in links:
        line_with(auto, link)


@pytest.mark.parametrize(
    ("mesh", "words"),
    [
        ({"outcome": "slower", "seconds": 1.02, "bound": 1.01}, "4 x 2 is 2.0 % slower"),
        ({"outcome": "bounded", "seconds": None, "bound": 1.5}, "4 x 2 is at least 50 % slower"),
        ({"outcome": "bounded", "seconds": None, "bound": 0.998}, "4 x 2 is at most 0.2 % faster"),
        ({"outcome": "bounded", "seconds": None, "bound": 0.9999}, "4 x 2 is as fast at best"),
        ({"outcome": "does not fit", "seconds": None, "bound": 1.0, "memory": 2**34}, "4 x 2 does not fit (16.0 GiB"),
        ({"outcome": "does not fit", "seconds": None, "bound": None}, "4 x 2 has no plan that fits"),
        ({"outcome": "not solved", "seconds": None, "bound": 0.9}, "within the time limit (at most 10 % faster)"),
    ],
)
def test_other_meshes_and_why_they_lost(auto, mesh, words):
    chosen = {"mesh": "8", "outcome": "chosen", "seconds": 1.0, "bound": 1.0}
    line_with(changed(auto, seconds=1.0, meshes=[chosen, {"mesh": "4 x 2", **mesh}]), words)


def test_a_search_that_was_stopped_says_so(auto):
    line_with(changed(auto, stopped=True), "the search was stopped early: there may be better plans")


def test_a_plan_that_does_not_fit_says_so(auto):
    line_with(changed(auto, limit=1), "IT DOES NOT FIT")


def test_equal_notes_of_layers_are_one_and_many_are_cut(auto):
    notes = [f"blocks.{layer}.odd / op (x) has no rule and runs replicated on every device" for layer in range(12)]
    plan = dataclasses.replace(auto, notes=(*notes, *(f"note {'abcdefgh'[at]}" for at in range(8))))
    line_with(plan, "blocks.*.odd / op (x) has no rule and runs replicated on every device (12 times)")
    line_with(plan, "and 3 more: see explain(plan, full=True)")
    assert "note h" in str(explain(plan, full=True))


def test_a_plan_without_a_prediction_shows_its_decisions(auto):
    text = str(explain(dataclasses.replace(auto, predicted={})))
    assert "how ops are split" in text
    assert "predicted step time" not in text


def test_one_device_sends_nothing():
    module, args, kwargs = ZOO["gpt"]()
    plan = make_plan(module, example=(args, kwargs), cluster="cpu", plan="single")
    line_with(plan, "exposed none predicted memory")
    assert json.loads(plan.to_json())["predicted"]["train"]["sent"] == []


def test_layers_that_follow_each_other_are_a_range():
    paths = [f"layers.{at}.mlp" for at in (0, 1, 4, 5, 6, 10)] + ["head", "layers.5.attn"]
    assert in_ranges(paths) == [
        "head", "layers.5.attn", "layers.0.mlp", "layers.1.mlp", "layers.4-6.mlp", "layers.10.mlp"
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0"), (2.5e-7, "0.25 us"), (12.34e-6, "12.3 us"), (0.155, "155 ms"), (3.0, "3 s")]
)
def test_times_as_people_say_them(seconds, text):
    assert format_time(seconds) == text


def test_a_rounding_error_is_no_time():
    assert format_time(-3.5e-16) == format_time(1e-13) == "0"
    assert format_time(2.5e-7) == "0.25 us"


@pytest.mark.parametrize(
    ("best", "bound", "words"),
    [
        (None, 0.9, "of 12 pipelines none was found that is faster (bound: at most 10 % faster)"),
        (None, 1.2, "of 12 pipelines none was found that is faster (bound: at least 20 % slower)"),
        (1.5, 1.0, "of 12 pipelines the best solved is 50 % slower (bound: as fast at best): pp"),
        (None, 1e12, "of 12 pipelines none was found that is faster"),
    ],
)
def test_pipelines_have_a_bound_of_their_own(auto, best, bound, words):
    solved = None if best is None else {"text": "pp", "seconds": best}
    pipelines = {"best": solved, "bound": bound, "tried": 2, "pruned": 10, "stopped": False}
    line_with(changed(auto, seconds=1.0, pipelines=pipelines), words)

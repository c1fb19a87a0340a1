"""The data of the visual report: its numbers are those of `sw.explain`, and nothing in a plan file gets out of it."""

import dataclasses
import json
import re
from itertools import pairwise

import pytest

import shardwright as sw
from shardwright.errors import InputError, PlanError
from shardwright.parallelize import captured_graph
from shardwright.parallelize import plan as make_plan
from shardwright.plan.folding import star
from shardwright.report import explain, read_plan, report
from shardwright.report.communication import format_bytes
from shardwright.report.text import format_time
from shardwright.report.visual.phases import EXPOSED, OVERLAPPED
from shardwright.report.visual.trace import chrome_trace
from tests.models.zoo import ZOO
from tests.options import grouped
from tests.report.llama import llama

OPTIONS = {"cluster": "2x4xA100-80GB", "precision": "bf16-mixed", "outputs": "scalars"}
PLANS = {"flat": "zero3=4,tp=2", "pipeline": "pp=2,dp=2,tp=2", "split backward": "pp=2,dp=4"}


@pytest.fixture(scope="module")
def graph():
    module, example = llama()
    return captured_graph(module, example, precision="bf16-mixed").graph


@pytest.fixture(scope="module")
def plans(graph):
    module, example = llama()
    options = {"example": example, **grouped(**OPTIONS)}
    every = {name: make_plan(module, plan=text, **options) for name, text in PLANS.items()}
    return {**every, "split backward": dataclasses.replace(every["split backward"], schedule="zb")}


@pytest.fixture(scope="module")
def contents(plans, graph):
    return {name: report(plan, graph).contents["plans"][0] for name, plan in plans.items()}


def rows_of(node):
    yield from node["rows"]
    for child in node["children"]:
        yield from rows_of(child)


@pytest.mark.parametrize("name", PLANS)
def test_the_head_has_the_numbers_of_explain(plans, contents, name):
    screen, predicted = " ".join(str(explain(plans[name])).split()), contents[name]["predicted"]
    assert f"predicted step time {format_time(predicted['seconds'])}" in screen
    assert f"predicted memory {format_bytes(predicted['memory']['peak'])} per device" in screen
    for part in predicted["parts"]:
        assert f"{part['name']} {format_time(part['seconds'])} (" in screen
    for op in predicted["ops"]:
        assert f"{op['name']} {op['count']} {format_time(op['seconds'])}" in screen


@pytest.mark.parametrize("name", PLANS)
def test_the_ops_of_the_tree_cost_what_the_plan_file_says(contents, name):
    """Forward and backward, of a mean device."""
    shown, top = contents[name], contents[name]["predicted"]["ops"][0]
    numbers = {
        number
        for op, number in zip(shown["names"], shown["rowOf"], strict=True)
        if number >= 0 and star(op) == top["name"]
    }
    rows = [row for row in rows_of(shown["tree"]) if row["id"] in numbers]
    sent = sum(reshard["seconds"] for row in rows for reshard in row.get("reshards", ()))
    assert sum(sum(row["costs"][:4]) for row in rows) - sent == pytest.approx(top["seconds"], rel=2e-3)


def test_the_timeline_adds_up_to_the_predicted_step(plans, contents):
    for name in ("flat", "pipeline"):
        total = contents[name]["timeline"]["total"] * 1e-6
        assert total == pytest.approx(plans[name].predicted["train"]["seconds"], rel=2e-3)


@pytest.mark.parametrize("name", ["flat", "pipeline"])
def test_the_blocks_of_a_phase_fill_it(contents, name):
    for stage in contents[name]["timeline"]["details"]:
        for phase in stage.values():
            lane = [
                (start, length)
                for start, length, kind in zip(phase["starts"], phase["lengths"], phase["kinds"], strict=True)
                if kind != OVERLAPPED
            ]
            assert sum(length for _, length in lane) == pytest.approx(1e6 * phase["seconds"], rel=2e-3, abs=1)
            for (start, length), (following, _) in pairwise(lane):
                assert start + length == pytest.approx(following, abs=0.1)


def test_overlapped_collectives_are_in_their_phase_and_do_not_overlap_each_other(contents):
    for phase in contents["flat"]["timeline"]["details"][0].values():
        blocks = sorted(
            (start, start + length)
            for start, length, kind in zip(phase["starts"], phase["lengths"], phase["kinds"], strict=True)
            if kind == OVERLAPPED
        )
        assert all(end <= 1e6 * phase["seconds"] * 1.002 + 1 for _, end in blocks)
        assert all(end <= start + 0.1 for (_, end), (start, _) in pairwise(blocks))
    forward = contents["flat"]["timeline"]["details"][0]["forward"]
    assert OVERLAPPED in forward["kinds"]
    assert forward["kinds"].count(EXPOSED) <= 1


@pytest.mark.parametrize("name", ["flat", "pipeline"])
def test_the_highest_point_of_the_memory_curve_is_the_predicted_peak(plans, contents, name):
    highest = max(
        rank["parameters"] + rank["optimizer"] + rank["inputs"] + sum(sample)
        for rank in contents[name]["curves"]["ranks"]
        for sample in zip(rank["activations"], rank["gradients"], rank["buffers"], strict=True)
    )
    assert highest == pytest.approx(plans[name].predicted["train"]["memory"]["peak"], rel=1e-4)


def test_equal_layers_are_one_and_every_op_has_a_row(contents, graph):
    children = {child["name"]: child for child in contents["pipeline"]["tree"]["children"][0]["children"]}
    assert contents["pipeline"]["names"].count("model.layers.1.mlp.up_proj / linear") == 1
    assert {op.name for op in graph.ops} <= set(contents["pipeline"]["names"])
    assert children["layers"]["stages"] == [0, 1]
    flat = {child["name"]: child for child in contents["flat"]["tree"]["children"][0]["children"]}
    assert [child["name"] for child in flat["layers"]["children"]] in (["0-1"], ["0", "1"])


def test_a_row_says_what_a_rank_has(contents):
    flat = contents["flat"]
    weights = (row for row in rows_of(flat["tree"]) if row.get("parameter") == "weight")
    row = next(row for row in weights if row["shape"] == [4096, 2048])
    assert flat["layouts"][row["layout"]]["dims"] == [["tp"], []]
    assert row["local"] == [2048, 2048]
    assert flat["texts"][row["stored"]][0] == "ZeRO-3 over dp"


def test_generated_lines_know_their_source(contents):
    code = contents["flat"]["code"]
    (lines,) = [each["lines"] for each in code["generated"]]
    source = {
        (number, run["first"] + at): text
        for number, file in enumerate(code["sources"])
        for run in file["runs"]
        for at, text in enumerate(run["lines"])
    }
    pairs = [(line[0].strip(), source[line[1], line[2]].strip()) for line in lines if len(line) > 1]
    assert any("F.silu(" in generated and "self.act_fn(" in written for generated, written in pairs)


def test_without_the_model_there_is_what_the_file_has(plans, tmp_path):
    plans["pipeline"].save(tmp_path / "plan.json")
    shown = report(read_plan(tmp_path / "plan.json")).contents["plans"][0]
    assert "--model" in shown["missing"]
    assert shown["timeline"]["lanes"][1]["kinds"].count("B") == plans["pipeline"].microbatches
    assert "details" not in shown["timeline"] and "curves" not in shown
    assert [child["name"] for child in shown["tree"]["children"]]


def test_a_plan_without_a_prediction_is_shown(plans):
    bare = dataclasses.replace(plans["flat"], predicted={})
    assert report(bare).contents["plans"][0]["predicted"] is None


def test_a_bound_that_is_not_known_is_left_out(plans):
    predicted = {**plans["flat"].predicted["train"], "bound": float("inf"), "gap": float("nan")}
    shown = report(dataclasses.replace(plans["flat"], predicted={"train": predicted}))
    assert shown.contents["plans"][0]["predicted"]["gap"] is None
    assert json.dumps(shown.contents, allow_nan=False)


def test_two_plans_have_their_differences(plans):
    both = report(plans["flat"], other=plans["pipeline"]).contents
    difference = sw.diff(plans["flat"], plans["pipeline"])
    assert [row[:2] for row in both["difference"]["rows"]] == [[row.what, row.name] for row in difference.rows]
    assert both["difference"]["totals"][0][1:3] == [difference.totals[0].a, difference.totals[0].b]


def test_another_entry_or_another_model_is_refused(plans, graph):
    module, args, kwargs = ZOO["gpt"]()
    other = make_plan(module, example=(args, kwargs), plan="tp=2")
    with pytest.raises(PlanError, match=r"does not fit|another graph"):
        report(other, graph)
    with pytest.raises(PlanError, match="no entry 'eval'"):
        report(plans["flat"], dataclasses.replace(graph, entry="eval"))
    with pytest.raises(InputError, match="no entry"):
        report(plans["flat"], other=dataclasses.replace(other, entries={"eval": other.stages}))


HOSTILE = "</script><script>alert(1)</script><!-- <img src=x onerror=alert(2)> & \u2028"


def test_nothing_of_a_plan_file_leaves_the_data(plans):
    hostile = dataclasses.replace(plans["flat"], model=HOSTILE, policy=HOSTILE, notes=(HOSTILE,))
    page = report(hostile).html
    assert page.count("</script>") == 2  # of the data and of the scripts
    assert "<img" not in page and "<!--" not in page
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data[1])["plans"][0]["notes"] == [HOSTILE]


def test_a_percent_sign_in_a_name_fills_nothing_in(plans):
    assert "%%scripts%%" in report(dataclasses.replace(plans["flat"], model="%%scripts%%")).html


def test_a_notebook_shows_a_plan_as_its_report(plans):
    frame = plans["flat"]._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert 'sandbox="allow-scripts"' in frame
    assert "<script" not in frame


@pytest.mark.parametrize("name", PLANS)
def test_the_predicted_trace_has_the_blocks_of_the_timeline(plans, graph, contents, name, tmp_path):
    events = chrome_trace(contents[name])["traceEvents"]
    steps = [event for event in events if event["ph"] == "X" and event["tid"] == 0]
    ops = [event for event in events if event["ph"] == "X" and event["tid"] == 1]
    end = max(event["ts"] + event["dur"] for event in steps) * 1e-6
    assert end == pytest.approx(contents[name]["timeline"]["total"] * 1e-6, rel=1e-3)
    assert {event["args"]["op"] for event in ops} & {op.name for op in graph.ops}
    for op in ops:
        around = [s for s in steps if s["pid"] == op["pid"] and s["ts"] - 1 <= op["ts"] <= s["ts"] + s["dur"] + 1]
        assert any(op["ts"] + op["dur"] <= step["ts"] + step["dur"] * 1.003 + 1 for step in around)
    backward = [event for event in steps if event["name"].startswith("backward")]
    inside = [
        op for op in ops if any(b["ts"] < op["ts"] < b["ts"] + b["dur"] and b["pid"] == op["pid"] for b in backward)
    ]
    assert bool(inside) == (name != "split backward")


def test_a_trace_needs_a_timeline(plans):
    with pytest.raises(InputError, match="needs its model"):
        chrome_trace(report(plans["flat"]).contents["plans"][0])

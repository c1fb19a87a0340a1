"""Plans with stages: who runs what, in how many microbatches, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest
import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.errors import PlanError, ShardwrightError
from shardwright.plan import Plan, parse_plan_string
from shardwright.plan.file import load, read
from shardwright.plan.pipeline import (
    MB,
    build_pipeline,
    check_microbatches,
    continue_pipeline,
    microbatches_of,
    schedule_of,
    timed,
    usual_microbatches,
)
from shardwright.plan.stages import OpSequence, split_graph
from shardwright.rules import analyse
from tests.layout.drawn import mesh_of
from tests.plan.graphs import facts_of, graph_of


def plan_of(text: str, name: str = "gpt", microbatches: int | None = 2, batch: int = 12) -> Plan:
    return build_pipeline(graph_of(name, batch), parse_plan_string(text), facts_of(name, batch), "", microbatches)


def devices(plan: Plan) -> list[tuple[int, ...]]:
    return [segment.mesh.devices for segment in plan.segments]


# Stages and segments.


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("pp=2", [(0,), (1,)]),
        ("pp=2,interleaved", [(0,), (1,), (0,), (1,)]),
        ("pp=2,zbv", [(0,), (1,), (1,), (0,)]),
        ("pp=2,dp=2", [(0, 1), (2, 3)]),
        ("pp=1+3,dp", [(0,), (1, 2, 3)]),
        ("pp=2,tp=2,interleaved", [(0, 1), (2, 3), (0, 1), (2, 3)]),
    ],
)
def test_segments_are_on_the_devices_that_the_schedule_wants(text, wanted):
    plan = plan_of(text)

    assert devices(plan) == wanted
    assert plan.is_pipeline
    assert plan.size == len({device for pp_rank in wanted for device in pp_rank})
    assert schedule_of(plan).holders == tuple(wanted)


@pytest.mark.parametrize("text", ["pp=2", "pp=4", "pp=2,interleaved", "pp=1+3,dp", "pp=2,zbv"])
@pytest.mark.parametrize("name", ["gpt", "unet", "hf_t5"])
def test_every_op_is_in_one_segment(name, text):
    plan = plan_of(text, name)

    named = [op for segment in plan.segments for op in segment.choices]
    assert sorted(named) == sorted(op.name for op in graph_of(name, 12).ops)


def test_stages_of_several_devices_split_as_without_stages_and_all_are_split_in_time():
    plan = plan_of("pp=2,tp=2")

    assert plan.choices("train")["blocks.0.up / linear"] == {MB: "ma", "tp": "n"}
    assert all(MB not in segment.mesh.names for segment in plan.segments), "time is no axis of devices"


def test_unequal_stages_use_what_they_have():
    plan = plan_of("pp=1+3,dp")

    axes = [{axis for choice in segment.choices.values() for axis in choice} for segment in plan.segments]
    assert axes == [{MB}, {MB, "dp"}]


@pytest.mark.parametrize("text", ["pp=1+3,zero1", "pp=3+1,zero2"])
def test_the_storage_of_unequal_stages_is_that_of_all(text):
    plan = plan_of(text)

    assert plan.storage and all(stored.written() == {"dp": int(text[-1])} for stored in plan.storage.values())


def test_layers_that_are_run_again_are_those_of_the_segment():
    plan = plan_of("pp=2,recompute", "gpt_deep")

    first, second = (segment.recompute for segment in plan.segments)
    assert {*first, *second} == {f"blocks.{number}" for number in range(13)}
    assert len({*first} & {*second}) <= 1, "a layer that is cut is run again by both, each its part"
    for segment in plan.segments:
        assert all(any(op.startswith(f"{path}.") for op in segment.choices) for path in segment.recompute)


# Microbatches.


def test_time_is_the_outermost_axis_unless_groups_have_their_own_rows():
    mesh = mesh_of(dp=2, tp=2)

    assert timed(mesh, 1) is mesh
    assert timed(mesh, 4).names == (MB, "dp", "tp")
    assert timed(mesh, 4, inside=True).names == ("dp", "tp", MB)


@pytest.mark.parametrize(
    ("batch", "stages", "replicas", "wanted"),
    [(64, 2, 1, 8), (64, 4, 2, 16), (12, 2, 1, 6), (7, 4, 1, 7), (4, 2, 4, 1)],
)
def test_without_a_word_there_are_about_four_a_stage(batch, stages, replicas, wanted):
    graph = dataclasses.replace(graph_of("mlp"), batch=batch)

    assert usual_microbatches(graph, stages, replicas) == wanted


@pytest.mark.parametrize(
    ("batch", "count", "replicas", "message"),
    [
        (4, 3, 1, "a batch of 4 does not divide into 3 microbatches; 1, 2, 4 would do"),
        (4, 8, 1, r"8 microbatches are more than the batch has rows \(4\); use 4 at most"),
        (12, 3, 2, None),
        (12, 4, 2, "a batch of 12 does not divide into 4 microbatches on 2 data-parallel devices; 1, 2, 3, 6 would do"),
        (5, 1, 2, "a batch of 5 does not divide into 1 microbatches on 2 data-parallel devices$"),
        (None, 2, 1, "2 microbatches split the batch, but the inputs have no common batch dim; use 1"),
        (None, 1, 1, None),
    ],
)
def test_numbers_that_do_not_divide_are_refused_with_those_that_do(batch, count, replicas, message):
    graph = dataclasses.replace(graph_of("mlp"), batch=batch)
    if message is None:
        check_microbatches(graph, count, replicas, local=False)
        return
    with pytest.raises(PlanError, match=message):
        check_microbatches(graph, count, replicas, local=False)


@pytest.mark.parametrize(("batch", "wanted"), [(24, 4), (12, 4), (8, 4), (6, 3), (2, 2), (1, 1), (5, 1)])
def test_a_smaller_batch_runs_in_as_many_microbatches_as_it_divides_by(batch, wanted):
    plan = plan_of("pp=2", "mlp", 4)

    assert microbatches_of(plan, dataclasses.replace(graph_of("mlp"), batch=batch)) == wanted


def test_what_each_group_has_counts_for_that():
    plan = plan_of("pp=2,dp=2", "mlp", 3)

    assert microbatches_of(plan, dataclasses.replace(graph_of("mlp"), batch=8)) == 2


# Other entries.


def test_another_entry_has_its_ops_where_the_first_has_them():
    plan, other = plan_of("pp=2,dp=2"), graph_of("gpt", 8)
    other = dataclasses.replace(other, entry="train-1")

    more = continue_pipeline(plan, analyse(other))

    assert [list(s.choices) for s in more.entries["train-1"]] == [list(s.choices) for s in plan.segments]
    assert more.choices("train-1") == plan.choices("train")
    assert more.entries["train"] == plan.entries["train"]
    assert more.fingerprints["train-1"] == other.fingerprint


class Modes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).tanh()).tanh()
        return self.c(x).square().mean() if self.training else self.c(x.sin()).cos()


def test_ops_that_the_first_entry_lacks_are_with_what_they_read():
    analysis = [
        analyse(capture(Modes().train(training), (torch.randn(4, 6),), {}, entry=entry).graph)
        for training, entry in ((True, "train"), (False, "eval"))
    ]
    plan = build_pipeline(analysis[0].graph, parse_plan_string("pp=3"), analysis[0], "", 2)

    parts = continue_pipeline(plan, analysis[1]).entries["eval"]

    home = {op: number for number, part in enumerate(parts) for op in part.choices}
    assert home["a / linear"] == 0 and home["/ cos"] == home["c / linear"] == 2
    assert home["/ sin"] == home["/ tanh.1"]
    cut = split_graph(OpSequence(analysis[1]), [tuple(part.choices) for part in parts])
    assert cut.edges == {(0, 1), (1, 2)}


# Files.


@pytest.mark.parametrize(
    "text", ["pp=2", "pp=4", "pp=2,interleaved", "pp=2,dp=2,zb", "pp=1+3,dp", "pp=2,zero1=2,recompute"]
)
@pytest.mark.parametrize("name", ["gpt", "gpt_deep", "hf_t5"])
def test_a_pipeline_that_is_saved_and_loaded_is_the_same_plan(tmp_path, name, text):
    plan = plan_of(text, name)

    plan.save(tmp_path / "plan.json")
    again = load(tmp_path / "plan.json", graph_of(name, 12))

    assert again == plan
    assert again.name == plan.name
    assert schedule_of(again) == schedule_of(plan)


@pytest.mark.parametrize("name", ["masked", "unet", "repeated", "contrastive", "regularized"])
def test_so_is_one_of_a_model_whose_ops_are_mostly_its_own(name):
    plan = plan_of("pp=2,interleaved=1", name)

    assert read(plan.to_json(), graph_of(name, 12)) == plan


def test_microbatches_alone_are_in_the_file_too():
    plan = build_pipeline(graph_of("mlp"), parse_plan_string("dp=2"), facts_of("mlp"), "", 2)
    data = json.loads(plan.to_json())

    assert (data["microbatches"], data["schedule"], data["local"]) == (2, "1f1b", False)
    assert "ops" not in data["entries"]["train"][0]
    assert read(plan.to_json(), graph_of("mlp")) == plan


def test_the_file_says_who_runs_what_by_module():
    data = json.loads(plan_of("pp=2", "gpt_deep").to_json())
    first, second = data["entries"]["train"]

    assert (first["devices"], second["devices"]) == ([0], [1])
    assert any(name.startswith("blocks.0-") for name in first["ops"])
    assert "wte" in first["ops"] and "head" in second["ops"]
    assert data["schedule"] == "1f1b"


def layers_of(plan: Plan) -> list[set[int]]:
    return [{int(match[1]) for op in s.choices if (match := re.match(r"blocks\.(\d+)", op))} for s in plan.segments]


def edited(change) -> str:
    """The file of a pipeline after somebody's hand was at it."""
    data = json.loads(plan_of("pp=2", "gpt_deep").to_json())
    change(data, *data["entries"]["train"])
    return json.dumps(data)


def test_layers_may_be_moved_by_hand():
    plan = plan_of("pp=2", "gpt_deep")
    assert layers_of(plan)[0] > {0, 1, 2}

    def move(data, first, second):
        first["ops"] = ["wte", "/ arange", "wpe", "/ add", "blocks.0-2"]
        second["ops"] = [
            "blocks.3-12", "ln", "head", "/ reshape", "/ reshape.1", "/ cross_entropy_loss",
        ]  # fmt: skip

    moved = read(edited(move), graph_of("gpt_deep", 12))

    assert layers_of(moved) == [{0, 1, 2}, set(range(3, 13))]
    assert split_graph(OpSequence(facts_of("gpt_deep", 12)), [tuple(s.choices) for s in moved.segments]).edges == {
        (0, 1)
    }


FAULTS = {
    "an op in two segments": (
        lambda data, first, second: second["ops"].append("wte"),
        "'wte / embedding' is in segments 0 and 1",
    ),
    "an op in none": (lambda data, first, second: second["ops"].remove("head"), "'head / linear' is in no segment"),
    "an op that is not there": (
        lambda data, first, second: first["ops"].append("tail / linear"),
        "'tail / linear' names nothing in the model",
    ),
    "a range too far": (
        lambda data, first, second: second["ops"].append("blocks.12-14"),
        "'blocks.13' names nothing in the model",
    ),
    "a choice of another segment's op": (
        lambda data, first, second: first["choices"].update({"head / linear": {"mb": "b"}}),
        "'head / linear' names nothing in segment 0",
    ),
    "a segment without a place": (
        lambda data, first, second: first.pop("devices"),
        r"entries.train\[0\].devices is missing",
    ),
    "a device in two meshes": (
        lambda data, first, second: second.update(mesh={"dp": 2}, devices=[0, 1]),
        "device 0 is in the meshes one device and dp=2; all stages of a device share a mesh",
    ),
    "a device that there is not": (
        lambda data, first, second: second.update(devices=[7]),
        "devices are numbered from 0 on, and these are 0, 7",
    ),
    "devices that do not fill the mesh": (
        lambda data, first, second: second.update(mesh={"dp": 3}, devices=[1, 2]),
        "segment 1: mesh dp=3 needs 3 distinct devices, got 2",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_of_a_file_that_was_edited_are_named(fault):
    change, message = FAULTS[fault]

    with pytest.raises(PlanError, match=message):
        read(edited(change), graph_of("gpt_deep", 12), "plan.json")


@pytest.mark.parametrize(
    ("text", "schedule", "message"),
    [
        ("pp=2", "zbb", "there is no schedule 'zbb'; the known ones are gpipe"),
        ("pp=2", "interleaved", "interleaved has segments on devices 0, 1, 0, 1, and the plan on 0, 1; name another"),
        ("pp=2,interleaved", "1f1b", "1f1b has segments on devices 0, 1, and the plan on 0, 1, 0, 1; name another"),
        ("pp=2,interleaved", "zbv", "zbv has segments on devices 0, 1, 1, 0, and the plan on 0, 1, 0, 1; name another"),
    ],
)
def test_a_schedule_that_does_not_fit_the_segments_is_refused(text, schedule, message):
    plan = dataclasses.replace(plan_of(text), schedule=schedule)

    with pytest.raises(ShardwrightError, match=message):
        schedule_of(plan)

"""Entries of `recompute`: what they may name, how the file says them, which ops they take in."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.errors import PlanError
from shardwright.ir.recompute import layers_of, regions_of
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.file import load
from shardwright.plan.lowering import lower
from shardwright.report import diff, read_plan
from tests.plan.graphs import analysis_of, deep_gpt, graph_of
from tests.plan.recomputing import plan_of


def drawn(name, text):
    return build_plan(graph_of(name), parse_plan_string(text), analysis_of(name))


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("gpt", ("blocks.0", "blocks.1")),
        ("hf_llama", ("model.layers.0", "model.layers.1")),
        ("hf_t5", ("encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1")),
        ("unet", ()),  # its only list is a Sequential of two small modules
    ],
)
def test_layers_are_the_items_of_lists_that_do_the_same(name, layers):
    assert layers_of(graph_of(name)) == layers


def test_the_word_in_a_plan_string_names_all_layers_and_stays_in_the_policy():
    plan = drawn("gpt", "dp=2, recompute, tp=2")

    assert plan.entries["train"][0].recompute == ("blocks.0", "blocks.1")
    assert plan.policy == "dp=2,tp=2,recompute"
    assert parse_plan_string(plan.policy).recompute
    assert str(parse_plan_string("recompute")) == "single,recompute"


def test_modules_beside_the_word_are_named():
    assert parse_plan_string("dp=2,recompute=blocks.0+blocks.1").recomputed == ("blocks.0", "blocks.1")
    with pytest.raises(PlanError, match="does not say which modules recompute is about"):
        parse_plan_string("dp=2,recompute=")


def test_a_model_without_layers_is_refused():
    with pytest.raises(PlanError, match="the model has none; name modules"):
        drawn("mlp", "dp=2,recompute")


@pytest.mark.parametrize(
    ("paths", "folded"),
    [
        ([f"blocks.{at}" for at in range(4)], ["blocks.*"]),
        ([f"blocks.{at}.attn" for at in range(4)], ["blocks.*.attn"]),
        (["blocks.0", "blocks.2"], ["blocks.0", "blocks.2"]),
        (["wte", "blocks.3"], ["wte", "blocks.3"]),
        (["blocks"], ["blocks"]),
    ],
)
def test_the_file_has_a_star_where_all_layers_do_it(tmp_path, paths, folded):
    graph, path = deep_gpt(4), tmp_path / "plan.json"
    plan = plan_of(graph, "dp=2", *paths)
    plan.save(path)

    assert json.loads(path.read_text())["entries"]["train"][0]["recompute"] == folded
    assert load(path, graph).entries["train"][0].recompute == tuple(paths)
    assert not diff(plan, read_plan(path))
    assert read_plan(path).to_json() == plan.to_json()


def test_a_file_that_names_what_is_not_there_is_refused(tmp_path):
    path = tmp_path / "plan.json"
    plan = drawn("gpt", "dp=2,recompute")
    path.write_text(plan.to_json().replace('"blocks.*"', '"layers.*"'))

    with pytest.raises(PlanError, match=r"'layers\.\*' names nothing in the model"):
        load(path, graph_of("gpt"))


def test_every_entry_that_cannot_be_is_named_at_once():
    graph = graph_of("gpt")
    plan = drawn("gpt", "dp=2")
    wrong = replace(plan.entries["train"][0], recompute=("blocks.7", "blocks.0", "blocks.0.attn", "wte", "wte", ""))

    with pytest.raises(PlanError) as error:
        lower(graph, replace(plan, entries={"train": (wrong,)}), analysis_of("gpt"))

    text = str(error.value)
    assert "'blocks.7', which is not a module of the model that has ops" in text
    assert "'blocks.0.attn', which is in 'blocks.0', and that is recomputed already" in text
    assert "'wte' twice" in text
    assert "'', the whole model, which saves nothing" in text


def test_a_region_of_the_users_model_is_taken_in_or_left_alone():
    graph = graph_of("checkpointed_gpt")
    regions = regions_of(graph, ["blocks.1"])

    assert {regions[op.name] for op in graph.ops if op.module_path.startswith("blocks.0")} == {"r0"}
    assert {regions[op.name] for op in graph.ops if op.module_path.startswith("blocks.1")} == {"recompute blocks.1"}
    with pytest.raises(PlanError, match="but the model checkpoints a region that reaches beyond it"):
        regions_of(graph, ["blocks.0.attn"])


class Again(nn.Module):
    """One block called four times in a row."""

    def __init__(self):
        super().__init__()
        self.block = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))

    def forward(self, x):
        for _ in range(4):
            x = x + self.block(x)
        return x.square().mean()


def test_every_call_of_a_module_is_a_region():
    graph = capture(Again(), (torch.randn(2, 4),), {}).graph
    regions = list(regions_of(graph, ["block"]).values())

    wanted = ["recompute block", "recompute block@1", "recompute block@2", "recompute block@3"]
    assert sorted(set(regions)) == wanted
    assert len({regions.count(region) for region in wanted}) == 1


class Remembering(nn.Module):
    """Scales by a buffer that it then changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        y = x * self.scale
        self.scale.mul_(0.9)
        return y


def test_a_module_that_reads_a_buffer_which_the_step_changes_is_refused():
    module = nn.Sequential(nn.Linear(4, 4), Remembering())
    graph = capture(module, (torch.randn(2, 4),), {}).graph

    with pytest.raises(PlanError, match=r"reads the buffer '1\.scale', which the step changes before backward"):
        regions_of(graph, ["1"])
    assert regions_of(graph, ["0"])


def test_differences_and_explanations_say_what_is_recomputed():
    graph = deep_gpt(4)
    none, some, every = (plan_of(graph, "dp=2", *(f"blocks.{at}" for at in range(count))) for count in (0, 2, 4))

    rows = [(row.what, row.name, row.a, row.b) for row in diff(none, every).rows]
    assert rows == [("train, backward", "blocks.*", "saved", "recomputed")]
    assert [row.name for row in diff(some, every).rows] == ["blocks.2", "blocks.3"]
    assert "recomputed in backward (train): blocks.*" in str(sw.explain(every))
    assert "recomputed in backward (train): blocks.0, blocks.1" in str(sw.explain(some))
    assert "recomputed" not in str(sw.explain(none))

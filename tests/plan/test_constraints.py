"""Constraints: how they are read, what each makes of a plan, and which of them are named when they clash."""

from __future__ import annotations

import json
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.cli import main
from shardwright.cluster import find
from shardwright.cost import TrainingSetup
from shardwright.errors import InputError, PlanError
from shardwright.plan.auto import SearchOptions, SearchResult, search
from shardwright.plan.binder import bind
from shardwright.plan.clash import find_clash
from shardwright.plan.constraint_kinds import (
    AxisConstraint,
    Constraints,
    MemoryConstraint,
    Range,
    SplitConstraint,
    Target,
    ZeroConstraint,
)
from shardwright.plan.constraints import read_constraints
from shardwright.plan.context import SearchContext
from shardwright.plan.price import price
from shardwright.rules import analyse
from tests.models.zoo import ZOO
from tests.plan.graphs import analysis_of
from tests.runtime.ranks import run_ranks

CLUSTER, TWO = find("cpu:4"), find("2x1xcpu")
DATA = {"axis": "dp", "size": 2, "splits": "batch"}
SHORT = 506e3
"""Bytes that the GPT fits in on two devices, if something is recomputed."""


@lru_cache
def classes_of(name):
    return {path: type(module).__name__ for path, module in ZOO[name]().module.named_modules()}


def searched(name, entries, cluster=CLUSTER, memory=None) -> SearchResult:
    constraints = read_constraints(entries, classes_of(name))
    return search(
        analysis_of(name), cluster, TrainingSetup(), SearchOptions(constraints=constraints, memory=memory, aim=0.05)
    )


def planned(name, entries, **options):
    return searched(name, entries, **options).plan


def named(name, entries, **options) -> list[int]:
    """The numbers of the entries that the error names."""
    with pytest.raises(PlanError, match="can't be done") as caught:
        planned(name, entries, **options)
    return [number for number in range(1, len(entries) + 1) if f"constraints, entry {number}:" in str(caught.value)]


# -- reading ---------------------------------------------------------------------------


def test_a_file_is_read_and_on_is_a_word(tmp_path):
    path = tmp_path / "wishes.yaml"
    path.write_text(
        "- {axis: tp, size: 2, inside: node}\n"
        '- {module: "blocks.*.up", op: linear, split: n, on: tp}\n'
        "- {memory: 70GiB}\n"
        "- {module: [wte, head], zero: 1}\n"
    )
    axis, split, memory, zero = read_constraints(path).items
    assert isinstance(axis, AxisConstraint) and (axis.name, axis.size, axis.inside, axis.data) == (
        "tp", Range(2, 2), True, False
    )  # fmt: skip
    assert isinstance(split, SplitConstraint) and split.target == Target(modules=("blocks.*.up",), ops=("linear",))
    assert (split.label, split.on) == ("n", "tp")
    assert isinstance(memory, MemoryConstraint) and memory.bytes == 70 * 2**30
    assert isinstance(zero, ZeroConstraint) and zero.target.modules == ("wte", "head")
    assert str(zero.source) == f"{path}, entry 4: {{module: [wte, head], zero: 1}}"


def test_all_faults_of_a_list_are_named_at_once():
    entries = [
        {"axis": "Tensor", "size": 1},
        {"module": "a", "split": "n", "zero": 1},
        {"module": "a"},
        "memory",
        {"module": "a", "replicated": False},
        {"split": "n", "on": "tp"},
        {"memory": "much"},
        {"memory": "1GiB", "on": "tp"},
        {"module": "a", "zero": 4},
        {"together": True},
        {"op": "linear", "recompute": True},
        {"module": [], "replicated": True},
        {"axis": "tp2", "inside": "rack", "splits": "rows"},
    ]
    with pytest.raises(PlanError) as caught:
        read_constraints(entries)
    lines = str(caught.value).splitlines()
    for number in range(1, len(entries) + 1):
        assert any(f"entry {number}" in line for line in lines), number
    assert len([line for line in lines if "entry 1:" in line or "entry 13:" in line]) == 4
    assert any("there is no axis 'tp'" in line and "add {axis: tp}" in line for line in lines)


def test_the_old_name_of_a_constraint_is_refused_with_the_new_one():
    with pytest.raises(PlanError, match=r"entry 1: .*whole is called replicated now; write replicated: true"):
        read_constraints([{"module": "a", "whole": True}])


@pytest.mark.parametrize(
    ("text", "why"),
    [("a: 1", "not a dict"), ("- {a: 1", "not YAML"), ("- {memory: 1, memory: 2}", "twice")],
)
def test_a_file_that_is_no_list_is_refused(tmp_path, text, why):
    path = tmp_path / "wishes.yaml"
    path.write_text(text)
    with pytest.raises(PlanError, match=why):
        read_constraints(path)


def test_names_that_the_model_does_not_have_are_named_at_once():
    entries = [
        {"module": "block.*.up", "replicated": True},
        {"class": "Blok", "replicated": True},
        {"op": "liner", "replicated": True},
        {"module": "blocks.*.up", "split": "q"},
        {"module": "blocks.0.ln1", "split": "sequence"},
    ]
    with pytest.raises(PlanError) as caught:
        planned("gpt", entries)
    message = str(caught.value)
    assert "no module 'block.*.up'" in message and "blocks.0.up" in message
    assert "class 'Blok'" in message and "Block" in message
    assert "no op 'liner'" in message and "aten.linear" in message
    assert "no op there has the label 'q'; linear has ma, mb, k, n" in message
    assert "entry 5" not in message


def test_a_star_stands_for_one_name_and_what_is_inside_is_meant():
    target = Target(modules=("blocks.*",))
    assert target.place("blocks.0.attn.qkv", {}) == "blocks.0"
    assert target.place("blocks", {}) is None
    assert Target(modules=("blocks.*.up",)).place("blocks.0.attn.up", {}) is None
    assert Target(modules=("blocks.0",), classes=("Linear",)).place("blocks.0.up", {"blocks.0.up": "Linear"}) == (
        "blocks.0.up"
    )
    assert Target(modules=("blocks.1",), classes=("Linear",)).place("blocks.0.up", {"blocks.0.up": "Linear"}) is None


# -- what each makes of a plan ------------------------------------------------------------


@pytest.mark.parametrize("size", [2, 4])
def test_an_axis_has_the_name_and_the_size_that_were_asked_for(size):
    plan = planned("mlp", [{"axis": "cp", "size": size}])
    assert plan.mesh.sizes["cp"] == size
    assert plan.mesh.size == 4
    assert plan.notes[-1] == f"keeps to constraints, entry 1: {{axis: cp, size: {size}}}"


def test_three_axes_can_be_asked_for():
    names = ["dp", "tp", "sp"]
    entries = [{"axis": name, "size": 2} for name in names] + [{"axis": "dp", "splits": "batch"}]
    plan = planned("mlp", entries, cluster=find("cpu:8"))
    assert sorted(plan.mesh.names) == sorted(names)


def test_an_axis_inside_of_nodes_is_the_last():
    cluster = find("2x2xA100-80GB")
    plan = planned("mlp", [{"axis": "tp", "size": 2, "inside": "node"}, {"axis": "dp"}], cluster=cluster)
    assert plan.mesh.names == ("dp", "tp")


def test_an_axis_that_splits_the_batch_splits_nothing_else():
    plan = planned("gpt", [{"axis": "dp", "size": 4, "splits": "batch"}])
    analysis = analysis_of("gpt")
    picked = {op: choice["dp"] for op, choice in plan.choices("train").items() if "dp" in choice}
    roles = [analysis.signatures[op].role(name) for op, name in picked.items() if name != "fan"]
    assert len(roles) > 40
    assert all(role.atom in analysis.batch for role in roles)


def test_ops_are_split_on_a_label_on_an_axis():
    plan = planned("gpt", [{"axis": "tp", "size": 2}, {"module": "blocks.*.up", "split": "n", "on": "tp"}])
    for layer in (0, 1):
        assert plan.choices("train")[f"blocks.{layer}.up / linear"]["tp"] == "n"


def test_without_an_axis_any_will_do():
    without, constrained = planned("gpt", []), planned("gpt", [{"module": "blocks.0.up", "split": "n"}])
    assert "n" not in without.choices("train").get("blocks.0.up / linear", {}).values()
    assert "n" in constrained.choices("train")["blocks.0.up / linear"].values()


@pytest.mark.parametrize(("word", "size"), [("batch", 4), ("sequence", 12)])
def test_batch_and_sequence_are_words_for_labels(word, size):
    plan = planned("gpt", [{"axis": "tp", "size": 2}, {"op": "aten.layer_norm", "split": word, "on": "tp"}])
    signature = analysis_of("gpt").signatures["ln / layer_norm"]
    assert signature.role(plan.choices("train")["ln / layer_norm"]["tp"]).size == size


def test_what_is_whole_is_split_on_no_axis_or_not_on_one():
    entries = [{"axis": "dp", "size": 4, "splits": "batch"}, {"class": "LayerNorm", "replicated": True}]
    plan = planned("gpt", entries)
    norms = [op for op in analysis_of("gpt").graph.by_name if "layer_norm" in op]
    assert len(norms) == 5
    assert not [op for op in norms if op in plan.choices("train")]
    entries = [{"axis": "dp", "splits": "batch"}, {"axis": "tp"}, {"op": "gelu", "replicated": True, "on": "tp"},
               {"module": "blocks.*.up", "split": "n", "on": "tp"}]  # fmt: skip
    assert set(planned("gpt", entries).choices("train")["blocks.0 / gelu"]) == {"dp"}


def test_modules_that_are_together_are_split_alike():
    split = {"module": "blocks.0.up", "split": "n"}
    apart = planned("gpt", [split]).choices("train")
    alike = planned("gpt", [split, {"class": "Block", "together": True}]).choices("train")
    assert "blocks.1.up / linear" not in apart
    for op in [op for op in analysis_of("gpt").graph.by_name if op.startswith("blocks.0")]:
        assert alike.get(op) == alike.get(op.replace("blocks.0", "blocks.1")), op
    assert "n" in alike["blocks.1.up / linear"].values()


class Stack(nn.Module):
    """Layers that read each other: the first of another kind, since its input has no gradient."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, y)


def test_ops_that_read_each_other_can_be_together_and_are_priced_as_they_are():
    analysis = analyse(capture(Stack(), (torch.randn(4, 16), torch.randn(4, 16)), {}).graph)
    entries = [{"module": "layers.*", "together": True}, {"module": "layers.2", "split": "k"}]
    result = search(analysis, CLUSTER, TrainingSetup(), SearchOptions(constraints=read_constraints(entries)))
    picked = [result.plan.choices("train")[f"layers.{at} / linear"] for at in range(4)]
    assert picked == [picked[2]] * 4
    assert "k" in picked[2].values()
    assert result.best.solution is not None
    assert price(analysis, CLUSTER, TrainingSetup(), result.plan).seconds == pytest.approx(result.best.solution.time)


def test_layers_that_are_together_are_recomputed_alike_and_priced_as_they_are():
    entries = [{"module": "blocks.*", "together": True}, {"module": "blocks.1.attn", "recompute": True}]
    result = searched("gpt", entries)
    assert result.plan.entries["train"][0].recompute == ("blocks.0.attn", "blocks.1.attn")
    assert result.best.solution is not None
    seconds = price(analysis_of("gpt"), CLUSTER, TrainingSetup(), result.plan).seconds
    assert seconds == pytest.approx(result.best.solution.time)


def test_memory_is_kept_to():
    free, limited = searched("gpt", [DATA], cluster=TWO), searched("gpt", [DATA, {"memory": SHORT}], cluster=TWO)
    before, after = (price(analysis_of("gpt"), TWO, TrainingSetup(), result.plan) for result in (free, limited))
    assert before.memory.peak > SHORT >= after.memory.peak
    assert before.seconds < after.seconds


@pytest.mark.parametrize(
    ("module", "expected"),
    [("blocks.0", ("blocks.0",)), ("blocks.*.ln1", ("blocks.0.ln1", "blocks.1.ln1")), ("head", ("head",)),
     ("blocks", ("blocks.0", "blocks.1"))],
)  # fmt: skip
def test_what_must_be_is_recomputed(module, expected):
    assert planned("gpt", [{"module": module, "recompute": True}]).entries["train"][0].recompute == expected


def test_what_must_not_be_is_not_recomputed():
    never, near = {"module": "blocks.1", "recompute": False}, find("cpu:2")
    before, after = (planned("gpt", [DATA, {"zero": 0}, *more], cluster=near, memory=570e3) for more in ([], [never]))
    assert any(path.startswith("blocks.1") for path in before.entries["train"][0].recompute)
    assert not any(path.startswith("blocks.1") for path in after.entries["train"][0].recompute)
    assert after.entries["train"][0].recompute


def test_a_level_is_not_exceeded():
    free = planned("gpt", [DATA], cluster=TWO, memory=530e3)
    assert free.storage["blocks.1.up.weight"].axes
    limited = planned("gpt", [DATA, {"class": "Block", "op": "linear", "zero": 0}], cluster=TWO, memory=530e3)
    assert not limited.storage["blocks.1.up.weight"].axes
    assert limited.storage["wte.weight"].axes  # others make up for it


# -- clashes ----------------------------------------------------------------------------


UP = "blocks.0.up"
CLASHES = [
    ([{"axis": "tp", "size": 3}], [1]),
    ([{"memory": "1GiB"}, {"axis": "tp", "size": 8}, {"zero": 1}], [2]),
    ([{"axis": "tp", "size": 4}, {"axis": "dp", "size": 2}], [1, 2]),
    ([{"axis": "tp", "size": 2}, {"zero": 2}, {"axis": "tp", "size": 4}], [1, 3]),
    ([{"axis": "tp"}, {"module": UP, "split": "n", "on": "tp"}, {"module": UP, "replicated": True}], [2, 3]),
    ([{"axis": "tp"}, {"module": UP, "split": "n", "on": "tp"}, {"module": UP, "split": "k", "on": "tp"}], [2, 3]),
    ([{"axis": "dp", "splits": "batch"}, {"module": UP, "split": "n", "on": "dp"}], [1, 2]),
    ([{"axis": "tp", "size": 4}, {"zero": 2}, {"module": "blocks.0.attn.qkv", "split": "n.0", "on": "tp"}], [1, 3]),
    ([{"module": "blocks.*", "together": True}, {"module": UP, "split": "n"}, {"zero": 3},
      {"module": "blocks.1.up", "replicated": True}], [1, 2, 4]),
    ([{"module": "blocks.0.attn", "recompute": True}, {"op": "linear", "zero": 1},
      {"class": "Attention", "recompute": False}], [1, 3]),
    ([{"memory": "1KiB"}, {"zero": 0}], [1]),
    ([{"memory": "250KB"}, {"zero": 0}, {"axis": "dp", "size": 4, "splits": "batch"}, {"class": "Block", "zero": 3}],
     [1, 2, 3]),
]  # fmt: skip


@pytest.mark.parametrize(("entries", "expected"), CLASHES)
def test_a_smallest_clashing_set_is_named(entries, expected):
    assert named("gpt", entries) == expected


def test_a_clash_says_what_to_change():
    with pytest.raises(PlanError) as caught:
        planned("gpt", CLASHES[7][0])
    message = str(caught.value)
    assert "there are 4 devices, 4 on a node" in message
    assert "n.0 has 3 in blocks.0.attn.qkv / linear" in message
    assert "without any one of them there is a plan" in message
    with pytest.raises(PlanError, match=r"1KiB.*\n.*at least .* KiB are needed"):
        planned("gpt", [{"memory": "1KiB"}])


def test_the_memory_of_a_device_may_be_what_clashes():
    with pytest.raises(PlanError) as caught:
        planned("gpt", [{"zero": 0}, {"axis": "dp", "size": 4, "splits": "batch"}], memory=250e3)
    message = str(caught.value)
    assert "the memory that is asked for: 244.1 KiB" in message and "entry 1" in message and "entry 2" in message
    with pytest.raises(PlanError, match="does not fit: the leanest plan"):
        planned("gpt", [{"module": "head", "zero": 1}], memory=1024.0)


def frame_of(name):
    return lambda constraints: SearchContext(
        analysis_of(name), CLUSTER, TrainingSetup(), bind(constraints, analysis_of(name))
    )


def test_out_of_time_it_says_that_there_may_be_less():
    constraints = read_constraints([{"zero": 1}, {"axis": "tp", "size": 3}])
    clash = find_clash(constraints, frame_of("mlp"), seconds=-1.0)
    assert clash is not None and len(clash.items) == 2
    assert "may have no part in it" in str(clash)


POOL = [
    {"axis": "tp", "size": 2}, {"axis": "tp", "size": 4}, {"axis": "dp", "size": 2}, {"axis": "dp", "splits": "batch"},
    {"op": "linear", "split": "n"}, {"op": "linear", "replicated": True}, {"op": "linear", "split": "batch"},
    {"module": "up", "split": "k"}, {"module": "down", "split": "n"}, {"zero": 0}, {"zero": 2},
    {"memory": "12KiB"}, {"memory": "16KiB"}, {"memory": "24KiB"}, {"together": True, "class": "Linear"},
]  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(st.lists(st.sampled_from(POOL), min_size=2, max_size=6, unique_by=str))
def test_what_is_named_clashes_and_nothing_less_does(entries):
    constraints = read_constraints(entries, classes_of("mlp"))
    clash = find_clash(constraints, frame_of("mlp"))
    if clash is None:
        return
    assert clash.smallest
    for item in clash.items:
        rest = tuple(other for other in clash.items if other is not item)
        assert find_clash(Constraints(items=rest, classes=constraints.classes), frame_of("mlp")) is None
    assert find_clash(clash.constraints, frame_of("mlp")) is not None


# -- the doors --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "entries"),
    [
        ("gpt", [{"axis": "tp", "size": 2}, {"module": "blocks.*.up", "split": "n", "on": "tp"},
                 {"module": "blocks.*.down", "split": "k", "on": "tp"}, {"axis": "dp", "splits": "batch"},
                 {"class": "LayerNorm", "replicated": True}, {"module": "blocks.0", "recompute": True}]),
        ("mlp", [{"op": "linear", "split": "n"}, {"axis": "ep", "size": 2}]),
    ],
)  # fmt: skip
def test_a_plan_that_keeps_to_constraints_computes_the_same(name, entries):
    case = ZOO[name](dtype=torch.float64)
    plan = sw.plan(case.module, example=(case.args, case.kwargs), cluster=4, constraints=entries)
    report = sw.verify(case.module, plan, example=(case.args, case.kwargs), method="threads")
    assert report.passed, str(report)


def test_parallelize_keeps_to_constraints(tmp_path):
    case = ZOO["mlp"](dtype=torch.float64)
    whole = case.module(*case.args).item()

    def run(rank):
        entries = [{"axis": "tp"}, {"op": "linear", "split": "n", "on": "tp"}]
        model = sw.parallelize(case.module, example=case.args, constraints=entries, compile={"directory": tmp_path})
        return model.plan.choices("train")["up / linear"], model(*case.args).item()

    for choice, loss in run_ranks(2, run):
        assert choice == {"tp": "n"}
        assert loss == pytest.approx(whole, abs=1e-12)


def test_constraints_are_for_whole_models():
    case = ZOO["mlp"]()
    assert sw.plan(case.module, example=case.args, plan="tp=2", constraints=[{"axis": "tp"}]).size == 2
    with pytest.raises(InputError, match="not over parts"):
        sw.parallelize(case.module, compile={"parts": ["up"]}, constraints=[{"axis": "tp"}])
    with pytest.raises(PlanError, match='inputs="per_replica" every axis splits the batch'):
        sw.plan(case.module, example=case.args, cluster=2, inputs="per_replica", constraints=[{"axis": "tp"}])


def test_the_command_line_takes_a_file(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "wishes.yaml").write_text("- {axis: tp, size: 2}\n- {op: linear, split: n, on: tp}\n")
    model = ["plan", "tests.plan.test_constraints:make_model", "--ranks", "4", "--constraints", "wishes.yaml"]
    assert main([*model, "-o", "plan.json"]) == 0
    assert "keeps to wishes.yaml, entry 2" in capsys.readouterr().out
    assert json.loads((tmp_path / "plan.json").read_text())["mesh"]["tp"] == 2
    (tmp_path / "wishes.yaml").write_text("- {axis: tp, size: 3}\n")
    assert main(model) == 2
    assert "wishes.yaml, entry 1: {axis: tp, size: 3}" in capsys.readouterr().err


def make_model():
    return Stack(), (torch.randn(4, 16), torch.randn(4, 16))

"""Chunked losses in plans: strings, files, builders, constraints, prices, the search, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw
from shardwright.capture import capture
from shardwright.cluster import find
from shardwright.compile import copy_to_meta
from shardwright.cost import TrainingSetup
from shardwright.errors import PlanError
from shardwright.ir import Graph
from shardwright.layout import Axis, Mesh
from shardwright.memory import simulate_memory
from shardwright.ops.chunked_losses import CHUNKED
from shardwright.plan import Plan, PlanBuilder, build_plan, parse_plan_string
from shardwright.plan.chunking import usual_chunks
from shardwright.plan.constraints import read_constraints
from shardwright.plan.file import load
from shardwright.plan.joint import find_best_plan
from shardwright.plan.lowering import lower
from shardwright.plan.pipeline import build_pipeline, continue_pipeline
from shardwright.plan.price import price
from shardwright.plan.request import PlanRequest
from shardwright.plan.search_options import SearchOptions
from shardwright.planning import continue_plan, make_plan, only_scalars
from shardwright.report import diff
from shardwright.report.plans import read_plan
from shardwright.rules import Analysis, analyse
from tests.models.zoo import ZOO
from tests.plan.graphs import analysis_of, graph_of

LOSS = "/ cross_entropy_loss"


def planned(text: str, name: str = "gpt") -> Plan:
    return build_plan(graph_of(name), parse_plan_string(text), analysis_of(name))


def chunks_of(plan: Plan, entry: str = "train") -> dict[str, int]:
    return {name: count for stage in plan.entries[entry] for name, count in stage.chunked_loss.items()}


# -- strings, builders and files


def test_a_word_of_a_plan_string_with_or_without_a_number() -> None:
    assert chunks_of(planned("dp=2,chunked_loss=3")) == {LOSS: 3}
    assert chunks_of(planned("chunked_loss")) == {LOSS: 8}
    for text in ("single,chunked_loss", "dp=2,tp=2,recompute,chunked_loss=4", "pp=2,chunked_loss"):
        assert str(parse_plan_string(text)) == text
    assert parse_plan_string("dp=2,chunked_loss=8").size == 2


@pytest.mark.parametrize("text", ["dp=2,chunked_loss=", "chunked_loss=1", "chunked_loss=many", "chunked_loss=-2"])
def test_a_number_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="does not say in how many chunks"):
        parse_plan_string(text)


def test_a_word_that_comes_twice_is_refused() -> None:
    with pytest.raises(PlanError, match="names chunked_loss twice"):
        parse_plan_string("chunked_loss,dp=2,chunked_loss=4")


def test_the_usual_number_keeps_enough_rows_in_a_chunk() -> None:
    assert usual_chunks(rows=65536, classes=131072, features=4096) == 32
    assert usual_chunks(rows=8192, classes=131072, features=4096) == 16  # 512 rows each
    assert usual_chunks(rows=1024, classes=131072, features=4096) == 8
    assert usual_chunks(rows=65536, classes=1000, features=4096) == 8
    assert usual_chunks(rows=3, classes=1000, features=16) == 3


def test_a_builder_takes_an_op_or_its_name() -> None:
    for value in (LOSS, graph_of("gpt").by_name[LOSS]):
        builder = PlanBuilder(graph_of("gpt"), Mesh(axes=(Axis(name="dp", size=2),)), analysis_of("gpt"))
        builder.chunk_loss(value, 5)
        assert chunks_of(builder.finish("own")) == {LOSS: 5}


def test_a_plan_file_has_it_and_one_without_is_still_read(tmp_path: Any) -> None:
    path, plan = tmp_path / "plan.json", planned("tp=2,chunked_loss=6")
    plan.save(path)

    assert json.loads(path.read_text())["entries"]["train"][0]["chunked_loss"] == {LOSS: 6}
    assert chunks_of(load(path, graph_of("gpt"))) == {LOSS: 6}
    assert read_plan(path).to_json() == plan.to_json()
    assert "chunked_loss" not in planned("tp=2").to_json()


def test_a_pipeline_has_it_in_the_stage_of_the_loss() -> None:
    request = parse_plan_string("pp=2,chunked_loss=3")
    plan = build_pipeline(graph_of("gpt", 4), request, analysis_of("gpt", 4), microbatches=2)

    assert [dict(stage.chunked_loss) for stage in plan.stages] == [{}, {LOSS: 3}]


def test_reports_say_it() -> None:
    whole, chunked = planned("dp=2"), planned("dp=2,chunked_loss=3")
    rows = [(row.what, row.name, row.a, row.b) for row in diff(whole, chunked).rows]

    assert ("train, logits", LOSS, "whole", "3 chunks") in rows
    assert f"chunks of logits (train): {LOSS} 3" in str(sw.explain(chunked))
    assert "chunks" not in str(sw.explain(whole))


# -- what is refused


def test_unknown_losses_and_too_many_chunks_are_named_at_once(tmp_path: Any) -> None:
    path, plan = tmp_path / "plan.json", planned("tp=2,chunked_loss=6")
    stage = replace(plan.stages[0], chunked_loss={"/ loss": 2, LOSS: 10_000})
    replace(plan, entries={"train": (stage,)}).save(path)

    with pytest.raises(PlanError) as error:
        load(path, graph_of("gpt"))
    assert f"the loss '/ loss', which the model does not have; the losses are '{LOSS}'" in str(error.value)
    assert "in 10000 chunks, and there are 48 rows; use 1 to 48" in str(error.value)
    assert "at transformer.py:" in str(error.value)


def test_more_chunks_than_a_rank_has_rows_are_refused() -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    with pytest.raises(PlanError, match=r"in 40 chunks, and a rank has 24 rows; use 24 at most"):
        lower(graph, planned("dp=2,chunked_loss=40"), analysis)


def test_a_builder_that_names_another_op_is_refused() -> None:
    builder = PlanBuilder(graph_of("gpt"), Mesh(axes=()), analysis_of("gpt"))
    builder.chunk_loss("head / linear", 2)
    with pytest.raises(PlanError, match=r"head / linear .* in chunks, but it is no cross_entropy"):
        builder.finish("own")


def test_returned_logits_are_refused_with_a_remedy() -> None:
    case = ZOO["hf_llama"]()
    with pytest.raises(PlanError, match=r"logits leave the model.*outputs=\"scalars\""):
        sw.plan(case.module, example=(case.args, case.kwargs), plan="single,chunked_loss")
    plan = sw.plan(
        case.module, example=(case.args, case.kwargs), plan="single,chunked_loss",
        compile=sw.CompileOptions(outputs="scalars"),
    )  # fmt: skip
    assert chunks_of(plan) == {LOSS: 8}


class Net(nn.Module):
    """A head whose logits `kind` does something with."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.embed, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)
        self.other = nn.Parameter(torch.randn(16, 32))

    def forward(self, idx: Tensor, target: Tensor) -> Any:
        x = self.embed(idx)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, 32), target.view(-1))
        if self.kind == "accuracy":
            return loss, (logits.argmax(-1) == target).float().mean()
        if self.kind == "keepdim":
            return loss + logits.logsumexp(-1, keepdim=True).mean()
        if self.kind == "other rows":
            return loss + logits[:, 1:].logsumexp(-1).mean()
        if self.kind == "turned":
            return F.cross_entropy((x @ self.other).view(-1, 32), target.view(-1))
        if self.kind == "softmax":
            return F.cross_entropy(logits.softmax(-1).view(-1, 32), target.view(-1))
        if self.kind == "probabilities":
            return F.cross_entropy(logits.view(-1, 32), logits.detach().softmax(-1).view(-1, 32))
        if self.kind == "rows":
            return F.cross_entropy(logits.transpose(0, 1).reshape(-1, 32), target.t().reshape(-1))
        return (logits.view(-1, 32) - target.view(-1, 1)).square().mean()


def net(kind: str) -> Graph:
    torch.manual_seed(0)
    idx = torch.randint(32, (4, 6))
    return capture(copy_to_meta(Net(kind)), (idx, idx.clone()), {}).graph


@pytest.mark.parametrize(
    ("kind", "why"),
    [
        ("accuracy", r"argmax .* at test_chunked_loss.py:\d+ reads the logits too"),
        ("keepdim", r"logsumexp .* keeps their dim; write logsumexp\(logits, -1\)"),
        ("other rows", r"logsumexp .* is of other rows than the loss"),
        ("turned", r"matmul .* a weight of \[features, classes\]; write F.linear"),
        ("softmax", r"softmax .* stands between its logits and their linear"),
        ("probabilities", "its targets are probabilities; pass class numbers"),
        ("rows", "changes the order of the rows"),
        ("squares", "is for cross entropies: the model has none"),
    ],
)
def test_logits_that_somebody_else_reads_are_refused(kind: str, why: str) -> None:
    graph = net(kind)
    with pytest.raises(PlanError, match=why):
        build_plan(graph, parse_plan_string("single,chunked_loss=2"))


def test_a_split_that_reshards_logits_is_refused() -> None:
    graph, analysis = graph_of("gpt"), analysis_of("gpt")
    builder = PlanBuilder(graph, Mesh(axes=(Axis(name="tp", size=2),)), analysis)
    head = graph.by_name["head / linear"]
    builder.split(head, builder.mesh.axes[0], next(role for role in builder.roles(head) if role.label == "k"))
    builder.chunk_loss(LOSS, 2)
    with pytest.raises(PlanError, match=r"all_reduce .* stands between .*; split the linear and the loss alike"):
        lower(graph, builder.finish("own"), analysis)


# -- more specializations


def test_an_evaluation_takes_over_what_it_can() -> None:
    case = ZOO["hf_llama"](batch=4)
    train = capture(copy_to_meta(case.module), case.args, case.kwargs).graph
    plan = make_plan(only_scalars(train), analyse(only_scalars(train)), PlanRequest.read("dp=2,chunked_loss=4"), 2)
    evaluated = capture(copy_to_meta(case.module.eval()), case.args, case.kwargs, entry="eval").graph

    continued = continue_plan(plan, evaluated, analyse(evaluated), PlanRequest.read("dp=2,chunked_loss=4"))
    assert chunks_of(continued, "eval") == {}
    assert any("not chunked in eval: its logits leave the model" in note for note in continued.notes)
    scalars = only_scalars(evaluated)
    continued = continue_plan(plan, scalars, analyse(scalars), PlanRequest.read("dp=2,chunked_loss=4"))
    assert chunks_of(continued, "eval") == {LOSS: 4}


def test_a_smaller_batch_has_fewer_chunks() -> None:
    plan = build_pipeline(graph_of("gpt", 4), parse_plan_string("pp=2,chunked_loss=16"), analysis_of("gpt", 4))
    rows = graph_of("gpt", 1).values[graph_of("gpt", 1).by_name[LOSS].inputs[1]].elements
    small = capture(copy_to_meta(ZOO["gpt"](batch=1).module), ZOO["gpt"](batch=1).args, {}, entry="train-1").graph

    continued = continue_pipeline(plan, analyse(small))
    assert 1 <= sum(chunks_of(continued, "train-1").values()) <= rows // 2


# -- programs, prices, memory and the search


@lru_cache
def wide() -> Analysis:
    """A GPT-shaped model with far more classes than features; nothing is allocated."""
    with torch.device("meta"):
        config = ZOO["gpt"]().module.config
        module = type(ZOO["gpt"]().module)(replace(config, vocab=8192, seq=64, d=64, n_layer=4))
        idx = torch.zeros(8, 64, dtype=torch.long)
    return analyse(capture(module, (idx, idx.clone()), {}).graph)


def wide_plan(text: str) -> Plan:
    return build_plan(wide().graph, parse_plan_string(text), wide())


def test_no_value_of_the_size_of_logits_is_left() -> None:
    program = lower(wide().graph, wide_plan("dp=2,tp=2,chunked_loss"), wide())
    logits = 8 * 64 * 8192

    assert [op.name for op in program.body if op.target == CHUNKED] == [LOSS]
    assert all(program.values[name].elements < logits for op in program.body for name in op.outputs)


def test_a_price_has_the_matmul_again_and_the_memory_of_a_chunk() -> None:
    cluster, training = find("2xH100"), TrainingSetup()
    whole, chunked = (price(wide(), cluster, training, wide_plan(text)) for text in ("dp=2", "dp=2,chunked_loss=8"))
    head = next(part for part in whole.ops if part.name == "head / linear")
    again = next(part for part in chunked.ops if part.name == "head / linear")
    logits = 4 * 64 * 8192 * 4.0

    assert head.seconds < again.seconds < 1.6 * head.seconds
    assert chunked.seconds - whole.seconds == pytest.approx(again.seconds - head.seconds, rel=0.05)
    assert whole.memory.peak - chunked.memory.peak == pytest.approx(3 * 7 / 8 * logits, rel=0.1)
    assert chunked.memory.peak == pytest.approx(
        simulate_memory(lower(wide().graph, wide_plan("dp=2,chunked_loss=8"), wide()), training).peak, rel=0.05
    )


def best(memory: float | None, entries: list[dict[str, Any]] | None = None) -> Plan:
    options = SearchOptions(memory=memory, constraints=read_constraints(entries), pipelines=False)
    return find_best_plan(wide(), find("2xH100"), TrainingSetup(), options, size=2).plan


def test_the_search_chunks_where_memory_is_short_and_says_why() -> None:
    roomy = best(None)
    needs = price(wide(), find("2xH100"), TrainingSetup(), roomy).memory.peak
    tight = best(0.55 * needs)

    assert chunks_of(roomy) == {}
    assert chunks_of(tight)
    assert any("logits in chunks" in note for note in tight.notes)
    assert price(wide(), find("2xH100"), TrainingSetup(), tight).memory.peak <= 0.55 * needs


def test_constraints_ask_for_chunks_or_forbid_them() -> None:
    needs = price(wide(), find("2xH100"), TrainingSetup(), best(None)).memory.peak

    assert chunks_of(best(None, [{"chunked_loss": True}])) == {LOSS: 8}
    assert chunks_of(best(None, [{"op": "cross_entropy_loss", "chunked_loss": 4}])) == {LOSS: 4}
    with pytest.raises(PlanError):
        best(0.3 * needs, [{"chunked_loss": False}])


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"chunked_loss": 1}, "chunked_loss is true, false or a number of chunks, not 1"),
        ({"chunked_loss": "many"}, "chunked_loss is true, false or a number of chunks"),
        ({"chunked_loss": 10_000}, "has 512 rows; ask for 512 chunks at most"),
        ({"module": "blocks.0", "chunked_loss": True}, "no cross_entropy of the model is meant"),
    ],
)
def test_constraints_that_make_no_sense(entry: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        best(None, [entry])

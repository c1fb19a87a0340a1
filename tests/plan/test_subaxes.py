"""An axis that is larger than what it is to share is several axes."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shardwright.capture import capture
from shardwright.errors import PlanError
from shardwright.ir import Graph
from shardwright.lower import LoweredProgram
from shardwright.plan import Plan, build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.rules import FAN, Analysis, analyse
from tests.layout.drawn import mesh_of
from tests.models.transformer import Transformer, TransformerConfig
from tests.plan.graphs import analysis_of, graph_of


@lru_cache
def gpt(heads: int, groups: int | None = None, vocab: int = 64) -> tuple[Graph, Analysis]:
    """A GPT of one layer; nothing is allocated."""
    with torch.device("meta"):
        module = Transformer(TransformerConfig(vocab=vocab, seq=8, d=48, n_layer=1, n_head=heads, n_kv=groups))
        idx = torch.zeros(4, 8, dtype=torch.long)
    graph = capture(module, (idx, idx.clone()), {}).graph
    return graph, analyse(graph)


def plan_of(text: str, analysed: tuple[Graph, Analysis]) -> Plan:
    return build_plan(analysed[0], parse_plan_string(text), analysed[1])


def program_of(text: str, analysed: tuple[Graph, Analysis]) -> LoweredProgram:
    return lower(analysed[0], plan_of(text, analysed), analysed[1])


def layouts_of(program: LoweredProgram) -> dict[str, str]:
    return {holding.name: str(holding.layout) for holding in program.parameters}


@pytest.mark.parametrize(
    ("heads", "groups", "text", "mesh"),
    [
        (4, 2, "tp=4", "tp0=2 x tp1=2"),  # two heads of keys, two of queries for each
        (8, 4, "tp=8", "tp0=4 x tp1=2"),
        (8, 2, "tp=8", "tp0=2 x tp1=4"),
        (4, 2, "tp=8", "tp0=2 x tp1=2 x tp2=2"),
        (6, None, "tp=4", "tp0=2 x tp1=2"),  # 6 heads on 4: 2, 1, 2, 1
        (2, None, "tp=4", "tp0=2 x tp1=2"),
        (4, 2, "dp=2,sp=4", "dp=2 x tp0=2 x tp1=2"),
        (4, 2, "tp=2", "tp=2"),
        (8, 4, "tp=4", "tp=4"),
        (4, None, "tp=4", "tp=4"),
    ],
)
def test_an_axis_is_refined_where_heads_can_not_be_shared_by_all_of_it(heads, groups, text, mesh):
    plan = plan_of(text, gpt(heads, groups))

    assert str(plan.mesh) == mesh
    assert plan.policy == text
    assert any(f"{text.rpartition(',')[2].replace('sp', 'tp')} is tp0=" in note for note in plan.notes) == ("0" in mesh)


def test_queries_are_cut_by_both_axes_and_keys_by_the_outer_one():
    layouts = layouts_of(program_of("zero3=2,tp=4", (graph_of("hf_llama"), analysis_of("hf_llama"))))
    layer = "model.layers.0"

    assert layouts[f"{layer}.self_attn.q_proj.weight"] == "[tp0 tp1, .] (dp: replicate)"
    assert layouts[f"{layer}.self_attn.k_proj.weight"] == "[tp0, .] (dp: replicate, tp1: replicate)"
    assert layouts[f"{layer}.self_attn.v_proj.weight"] == "[tp0, .] (dp: replicate, tp1: replicate)"
    assert layouts[f"{layer}.self_attn.o_proj.weight"] == "[., tp0 tp1] (dp: replicate)"
    assert layouts[f"{layer}.mlp.up_proj.weight"] == "[tp0 tp1, .] (dp: replicate)"
    assert layouts[f"{layer}.mlp.down_proj.weight"] == "[., tp0 tp1] (dp: replicate)"
    assert layouts["model.norm.weight"] == "[.] (dp: replicate)"


def test_two_heads_are_computed_by_pairs_and_their_product_is_shared():
    program = program_of("tp=4", gpt(2))

    layouts = layouts_of(program)
    assert layouts["blocks.0.attn.qkv.weight"] == "[tp0, .] (tp1: replicate)"
    assert layouts["blocks.0.attn.proj.weight"] == "[., tp0 tp1]"


def test_six_heads_are_cut_by_two_and_then_unevenly():
    (holding,) = (h for h in program_of("tp=4", gpt(6)).parameters if h.name == "blocks.0.attn.proj.weight")
    sizes = {"tp0": 2, "tp1": 2}

    local = [
        holding.layout.local_shape(holding.shape, sizes, {"tp0": a, "tp1": b})[1] // 8 for a in (0, 1) for b in (0, 1)
    ]
    assert local == [2, 1, 2, 1]


def test_what_does_not_divide_by_the_outer_axis_is_whole_along_the_inner_one():
    assert layouts_of(program_of("tp=4", gpt(6, vocab=31)))["wte.weight"] == "[tp0, .]"


def test_an_axis_that_no_parameter_can_fill_is_refused_as_before():
    graph, analysis = graph_of("mlp"), analysis_of("mlp")

    with pytest.raises(PlanError, match="larger than every dim"):
        build_plan(graph, parse_plan_string("tp=512"), analysis)


def test_another_entry_is_refined_as_the_first_is():
    request = parse_plan_string("dp=2,tp=4")

    assert str(request.like(mesh_of(dp=2, tp0=2, tp1=2)).mesh) == "dp=2 x tp0=2 x tp1=2"
    assert str(request.like(mesh_of(dp=2, tp=4)).mesh) == "dp=2 x tp=4"
    assert str(request.like(mesh_of(dp=2, tp0=2, tp1=2))) == "dp=2,tp=4"


def test_stages_of_a_pipeline_have_refined_axes_too():
    request = parse_plan_string("pp=2,tp=4").like(mesh_of(tp0=2, tp1=2))

    assert [str(request.mesh_of(size)) for size in request.stages] == ["tp0=2 x tp1=2"] * 2


class MultiQuery(nn.Module):
    """Four heads of queries that share one of keys, which is also that of values."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.q, self.k, self.out = nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 8), nn.Linear(32, 32)

    def forward(self, x):
        x = self.norm(x)
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        k = self.k(x).unsqueeze(1).expand(-1, 4, -1, -1)
        y = F.scaled_dot_product_attention(q, k, k, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2)).square().mean()


def test_one_head_of_keys_for_all_hands_its_gradient_back_in_parts_where_the_queries_do():
    graph = capture(MultiQuery(), (torch.randn(2, 8, 32, requires_grad=True),), {}).graph
    analysed = graph, analyse(graph)
    plan, program = plan_of("tp=4", analysed), program_of("tp=4", analysed)

    assert plan.choices("train")["k / linear"] == {"tp": FAN}
    assert layouts_of(program)["k.weight"] == "[., .] (tp: replicate)"
    assert layouts_of(program)["norm.weight"] == "[.]", "the sum comes before it in backward"

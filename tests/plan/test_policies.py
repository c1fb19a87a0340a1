"""What the fixed policies choose on the models of the zoo."""

from __future__ import annotations

import pytest

from shardwright.errors import PlanError
from shardwright.layout import Block
from shardwright.plan import PlanBuilder, build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from shardwright.rules import FAN
from shardwright.storage import storage_kind
from tests.layout.drawn import mesh_of
from tests.plan.graphs import analysis_of, graph_of


def program_of(text: str, name: str = "gpt", batch: int = 4):
    graph, analysis = graph_of(name, batch), analysis_of(name, batch)
    return lower(graph, build_plan(graph, parse_plan_string(text), analysis), analysis)


def cuts_of(text: str, name: str = "gpt") -> dict:
    """For each parameter the (dim, blocks) that tp cuts."""
    shards = {}
    for holding in program_of(text, name).parameters:
        cut = holding.layout.shard_of("tp")
        shards[holding.name] = None if cut is None else (cut[0], cut[1].blocks)
    return shards


def test_tensor_parallel_gpt_is_split_by_heads_and_hidden_units_and_vocabulary():
    cuts = cuts_of("tp=2")

    assert cuts["blocks.0.attn.qkv.weight"] == (0, (Block(3, 2, 16),)), "(3 h e): half the heads of q, k and v"
    assert cuts["blocks.0.attn.qkv.bias"] == (0, (Block(3, 2, 16),))
    assert cuts["blocks.0.attn.proj.weight"] == (1, (Block(1, 2, 16),))
    assert cuts["blocks.0.up.weight"] == (0, (Block(1, 2, 64),))
    assert cuts["blocks.0.down.weight"] == (1, (Block(1, 2, 64),))
    assert cuts["wte.weight"] == (0, (Block(1, 2, 32),))
    assert cuts["blocks.0.attn.proj.bias"] is None
    assert cuts["blocks.0.ln1.weight"] is None


def test_grouped_heads_in_one_fused_weight_are_cut_in_every_section():
    cut = cuts_of("tp=2", "gqa_fused")["blocks.0.attn.qkv.weight"]

    assert cut == (0, (Block(1, 2, 16), Block(1, 2, 8), Block(1, 2, 8))), "4 heads of queries, 2 of keys, 2 of values"


def test_gate_and_up_in_one_weight_are_both_cut():
    assert cuts_of("tp=2", "swiglu")["gate_up.weight"] == (0, (Block(2, 2, 16),))


def test_data_parallel_splits_every_op_that_has_the_batch_and_no_parameter():
    plan = build_plan(graph_of("gpt"), parse_plan_string("dp=2"), analysis_of("gpt"))

    program = lower(graph_of("gpt"), plan, analysis_of("gpt"))

    assert all(holding.layout.shard_of("dp") is None for holding in program.parameters)
    fed = [op for op in graph_of("gpt").ops if any(graph_of("gpt").values[n].shape[:1] == (4,) for n in op.outputs)]
    assert all(plan.choices("train")[op.name] for op in fed)


def test_positions_that_depend_on_parameters_only_hand_their_gradient_back_in_parts():
    choices = build_plan(graph_of("gpt"), parse_plan_string("dp=2"), analysis_of("gpt")).choices("train")

    assert choices["wpe / embedding"] == {"dp": FAN}


@pytest.mark.parametrize("level", [1, 2, 3])
def test_zero_stores_every_parameter_along_its_axis(level):
    plan = build_plan(graph_of("gpt"), parse_plan_string(f"zero{level}=2"), analysis_of("gpt"))

    assert set(plan.storage) == {parameter.key for parameter in graph_of("gpt").parameters}
    assert set(plan.storage.values()) == {storage_kind(level)(("dp",))}


def test_sequence_parallel_splits_the_norms_along_the_sequence():
    program = program_of("sp=2")
    norms = [op for op in program.body if op.target == "aten.layer_norm.default"]

    assert norms
    assert all(program.layouts[op.outputs[0]].shard_of("tp")[0] == 1 for op in norms)


def test_sequence_parallel_without_a_sequence_is_tensor_parallel():
    tp = build_plan(graph_of("mlp"), parse_plan_string("tp=2"), analysis_of("mlp"))
    sp = build_plan(graph_of("mlp"), parse_plan_string("sp=2"), analysis_of("mlp"))

    assert sp.choices("train") == tp.choices("train")


def test_a_batch_that_does_not_divide_is_refused_with_the_numbers_and_what_would_do():
    with pytest.raises(PlanError, match=r"a batch of 4 does not divide over 3 .*use a batch of 6"):
        build_plan(graph_of("gpt"), parse_plan_string("dp=3"), analysis_of("gpt"))


def test_a_batch_smaller_than_the_axis_is_refused_too():
    with pytest.raises(PlanError, match=r"a batch of 4 does not divide over 8 .*use a batch of 8"):
        build_plan(graph_of("gpt"), parse_plan_string("dp=8"), analysis_of("gpt"))


def test_an_axis_larger_than_the_dim_is_refused_with_op_and_both_numbers():
    builder = PlanBuilder(graph_of("gpt"), mesh_of(tp=8), analysis_of("gpt"))
    op = next(op for op in builder.ops if "attention" in op.target)
    role = next(role for role in builder.roles(op) if role.name == "g")

    with pytest.raises(PlanError, match=r"tp=8 is larger than g, which has 4; use a smaller axis") as error:
        builder.split(op, builder.mesh.axes[0], role)

    assert "transformer.py:" in str(error.value), "the line of the model"


def test_a_role_that_an_op_lacks_is_refused_with_those_it_has():
    builder = PlanBuilder(graph_of("mlp"), mesh_of(tp=2), analysis_of("mlp"))
    op = next(op for op in builder.ops if op.target == "aten.linear.default")

    with pytest.raises(PlanError, match=r"can't be split on 'q'; it can be split on: ma, k, n"):
        builder.signature(op).role("q")

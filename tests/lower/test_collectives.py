"""Which reshards stand where: two reductions a block and direction, nothing gathered in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.layout import Block
from shardwright.lower import LoweredProgram, reshard_kind
from shardwright.lower.overlap import awaited_later, count_early
from shardwright.lower.tidy import fold_mean
from shardwright.plan import build_plan, parse_plan_string
from shardwright.plan.lowering import lower
from tests.plan.graphs import analysis_of, graph_of


def program_of(text: str, name: str = "gpt") -> LoweredProgram:
    graph, analysis = graph_of(name), analysis_of(name)
    return lower(graph, build_plan(graph, parse_plan_string(text), analysis), analysis)


def reshards(program: LoweredProgram, inside: str = "") -> Counter:
    """How many reshards of each kind there are in a module and what it holds."""
    kinds = (reshard_kind(op) for op in program.body if op.module_path.startswith(inside))
    return Counter(kind for kind in kinds if kind is not None)


@pytest.mark.parametrize(
    ("name", "block"),
    [
        ("gpt", "blocks.1"),
        ("gqa_fused", "blocks.1"),
        ("rotary", "blocks.1"),
        ("hf_gpt2", "transformer.h.1"),
        ("hf_llama", "model.layers.1"),
    ],
)
def test_tensor_parallel_blocks_sum_twice_forward_and_twice_backward_and_gather_nothing(name, block):
    assert reshards(program_of("tp=2", name), block) == {"all_reduce": 2, "replicate": 2}


@pytest.mark.parametrize(
    ("name", "block", "text", "inside"),
    [
        ("hf_llama", "model.layers.1", "tp=4", {}),  # two KV heads
        ("gqa_fused", "blocks.1", "tp=4", {"shard_from_r": 1}),  # queries are replicated in a group; nothing is sent
        ("gpt", "blocks.1", "tp=8", {"shard_from_r": 1}),  # four heads, each of a pair
    ],
)
def test_an_axis_that_is_two_sums_over_both_at_once_and_no_more_than_one_axis(name, block, text, inside):
    program = program_of(text, name)

    assert reshards(program, block) == {"all_reduce": 2, "replicate": 2, **inside}
    sums = [op.argument("axes") for op in program.body if reshard_kind(op) in ("all_reduce", "replicate")]
    assert set(sums) == {("tp0", "tp1")}


def test_a_sequence_that_two_axes_cut_is_gathered_and_scattered_over_both_at_once():
    program = program_of("sp=4", "hf_llama")

    assert reshards(program, "model.layers.1") == {"all_gather_to_r": 2, "reduce_scatter": 2}
    communicates = [op for op in program.body if reshard_kind(op) is not None]
    assert {op.argument("axes") for op in communicates} == {("tp0", "tp1")}


def test_classes_and_tables_that_two_axes_cut_are_those_of_one_axis():
    program = program_of("tp=4", "gqa_fused")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")
    (table,) = (op for op in program.body if op.target == "runtime.embedding_rows")

    assert loss.argument("classes") == table.argument("axes") == ("tp0", "tp1")
    assert loss.argument("sharding").blocks == table.argument("sharding").blocks == (Block(1, 4, 16),)


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_sequence_parallel_blocks_scatter_and_gather_in_their_place(name):
    block = "blocks.1" if name == "gpt" else "transformer.h.1"

    assert reshards(program_of("sp=2", name), block) == {"reduce_scatter": 2, "all_gather_to_r": 2}


def test_data_parallel_communicates_about_the_loss_only():
    program = program_of("dp=2")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")

    assert reshards(program) == {"shard": 2, "all_reduce": 1}
    (count,) = (op for op in program.body if op.target == "runtime.begin_count")
    (total,) = (op for op in program.body if op.target == "comm.all_reduce")
    assert (count.argument("samples"), loss.inputs[-1]) == (("dp",), count.outputs[0])
    assert total.argument("later")
    assert program.values[total.outputs[0]].shape == ()


def test_labels_are_cut_and_counted_before_anything_else():
    body = program_of("dp=2").body
    at = next(number for number, op in enumerate(body) if op.target == "runtime.begin_count")

    assert {op.target for op in body[:at]} == {"comm.shard", "aten.reshape.default"}


def test_labels_that_the_model_computes_are_counted_with_their_loss():
    program = program_of("dp=2")
    count = next(op for op in program.body if op.target == "runtime.begin_count")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")
    plain = replace(loss, inputs=loss.inputs[:-1]).with_arguments(count=None)
    learned = replace(
        next(op for op in program.body if op.outputs == count.inputs), inputs=(program.parameters[0].value,)
    )
    body = tuple({loss.name: plain, learned.name: learned}.get(op.name, op) for op in program.body if op is not count)

    assert count_early(program.with_(body=body)).body == body


def test_a_loss_that_an_op_reads_is_not_awaited_later():
    program = program_of("dp=2")
    (total,) = (op for op in program.body if op.target == "comm.all_reduce")
    reader = replace(total, name="reader", target="aten.neg.default", inputs=total.outputs, outputs=("negative",))
    body = tuple(total.with_arguments(later=None) if op is total else op for op in program.body)

    assert awaited_later(program.with_(body=body)).body == program.body
    assert awaited_later(program.with_(body=(*body, reader))).body == (*body, reader)


def test_a_mean_that_nobody_counted_early_is_summed_with_its_count():
    program = program_of("dp=2")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")
    plain = replace(loss, inputs=loss.inputs[:-1]).with_arguments(count=None)
    body = tuple(plain if op is loss else op for op in program.body)

    (joined,) = (op for op in fold_mean(program.with_(body=body)).body if op.target == "runtime.cross_entropy")
    assert joined.argument("reduced")
    kept = program.with_(body=body, outputs=(*program.outputs, loss.outputs[0]))
    assert fold_mean(kept).body == body


def test_two_axes_do_both():
    kinds = reshards(program_of("dp=2,tp=2"), "blocks.1")

    assert kinds == {"all_reduce": 2, "replicate": 2}


def test_a_bias_waits_for_the_sum():
    program = program_of("tp=2")
    proj = next(op for op in program.body if op.name == "blocks.0.attn.proj / linear")
    after = [op.target for op in program.body if op.module_path == "blocks.0.attn.proj"]

    assert len(proj.inputs) == 2, "the bias is not added where the sum is partial"
    assert after == ["aten.linear.default", "comm.all_reduce", "aten.add.Tensor"]


def test_a_bias_of_whole_rows_is_one_call_again():
    up = next(op for op in program_of("tp=2").body if op.name == "blocks.0.up / linear")

    assert len(up.inputs) == 3


def test_a_parameter_gradient_is_not_converted_per_use_but_summed_once_a_step():
    program = program_of("dp=2")

    values = {holding.value for holding in program.parameters}
    assert not [op for op in program.body if op.target.startswith("comm.") and op.inputs[0] in values]
    assert all(str(holding.layout.placement("dp")) == "replicate" for holding in program.parameters)


def test_a_regularizer_on_the_weights_becomes_a_gradient_on_one_rank():
    program = program_of("dp=2", "regularized")

    on_first = [op for op in program.body if op.target == "comm.invariant"]
    assert {op.inputs[0] for op in on_first} == {h.value for h in program.parameters if h.name.endswith("weight")}

"""Which converters stand where: two reductions a block and direction, nothing gathered in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from shardwright.lower import Program, converter_of, lower
from shardwright.lower.tidy import fold_mean
from shardwright.plan import draw, read_request
from tests.plan.graphs import facts_of, graph_of


def program_of(text: str, name: str = "gpt") -> Program:
    graph, facts = graph_of(name), facts_of(name)
    return lower(graph, draw(graph, read_request(text), facts), facts)


def converters(program: Program, inside: str = "") -> Counter:
    """How many converters of each kind there are in a module and what it holds."""
    kinds = (converter_of(op) for op in program.body if op.module_path.startswith(inside))
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
    assert converters(program_of("tp=2", name), block) == {"fan_in": 2, "fan_out": 2}


@pytest.mark.parametrize("name", ["gpt", "hf_gpt2"])
def test_sequence_parallel_blocks_scatter_and_gather_in_their_place(name):
    block = "blocks.1" if name == "gpt" else "transformer.h.1"

    assert converters(program_of("sp=2", name), block) == {"reduce_scatter": 2, "gather_sum": 2}


def test_data_parallel_talks_about_the_loss_only():
    program = program_of("dp=2")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")

    assert set(converters(program)) == {"take"}
    assert (loss.argument("rows"), loss.argument("whole")) == (("dp",), True)  # with its count, in one sum
    assert program.values[loss.outputs[0]].shape == ()


def test_a_loss_that_something_else_reads_in_parts_keeps_its_sum():
    program = program_of("dp=2")
    (loss,) = (op for op in program.body if op.target == "runtime.cross_entropy")
    share = replace(loss, outputs=("share",)).with_arguments(whole=None)
    total = replace(
        loss, name="sum", target="comm.fan_in", inputs=("share",), arguments=(("axes", ("dp",)),), outputs=loss.outputs
    )
    body = (*(op for op in program.body if op is not loss), share, total)

    assert total not in fold_mean(program.with_(body=body)).body
    assert total in fold_mean(program.with_(body=body, outputs=(*program.outputs, "share"))).body


def test_two_axes_do_both():
    kinds = converters(program_of("dp=2,tp=2"), "blocks.1")

    assert kinds == {"fan_in": 2, "fan_out": 2}


def test_a_bias_waits_for_the_sum():
    program = program_of("tp=2")
    proj = next(op for op in program.body if op.name == "blocks.0.attn.proj / linear")
    after = [op.target for op in program.body if op.module_path == "blocks.0.attn.proj"]

    assert len(proj.inputs) == 2, "the bias is not added where the sum is partial"
    assert after == ["aten.linear.default", "comm.fan_in", "aten.add.Tensor"]


def test_a_bias_of_whole_rows_is_one_call_again():
    up = next(op for op in program_of("tp=2").body if op.name == "blocks.0.up / linear")

    assert len(up.inputs) == 3


def test_a_parameter_gradient_is_not_converted_per_use_but_summed_once_a_step():
    program = program_of("dp=2")

    held = {holding.value for holding in program.holdings}
    assert not [op for op in program.body if op.target.startswith("comm.") and op.inputs[0] in held]
    assert all(str(holding.layout.placement("dp")) == "fanned" for holding in program.holdings)


def test_a_regularizer_on_the_weights_becomes_a_gradient_on_one_rank():
    program = program_of("dp=2", "regularized")

    on_first = [op for op in program.body if op.target == "comm.gradient_on_first"]
    assert {op.inputs[0] for op in on_first} == {h.value for h in program.holdings if h.key.endswith("weight")}

"""A plan explained: what it decides, and with the graph what a rank holds and sends."""

import pytest

from shardwright.capture import capture
from shardwright.compile import copy_to_meta
from shardwright.parallelize import plan as make_plan
from shardwright.report import explain
from shardwright.report.communication import format_bytes, totals
from tests.models.zoo import ZOO


@pytest.fixture(scope="module")
def gpt():
    module, args, kwargs = ZOO["gpt"]()
    return module, (args, kwargs), capture(copy_to_meta(module), args, kwargs).graph


def lines_with(text, *words):
    return [line for line in text.splitlines() if all(word in line for word in words)]


def test_the_plan_alone_says_how_ops_are_split(gpt):
    module, example, _ = gpt
    text = str(explain(make_plan(module, example=example, plan="dp=2,tp=2"), full=True))

    assert "mesh dp=2 x tp=2: 4 devices" in text
    assert lines_with(text, "layer_norm", "blocks.*.ln1, blocks.*.ln2, ln", "5")
    assert "collectives of a training step" not in text


def test_the_plan_alone_says_what_zero_splits(gpt):
    module, example, _ = gpt
    text = str(explain(make_plan(module, example=example, plan="zero3=2"), full=True))

    assert lines_with(text, "blocks.*.attn.qkv.weight", "parameter, gradient and optimizer state over dp")


def test_with_the_graph_it_says_what_a_rank_holds(gpt):
    module, example, graph = gpt
    text = str(explain(make_plan(module, example=example, plan="dp=2,tp=2"), graph))

    assert lines_with(text, "blocks.*.attn.qkv.weight", "96 x 32", "48 x 32", "[tp, .]", "dp")
    assert lines_with(text, "linear", "blocks.*.down", "(tp: partial sum)")


def test_memory_falls_with_the_level_of_zero(gpt):
    module, example, graph = gpt
    kept = {}
    for plan in ("dp=4", "zero1=4", "zero2=4", "zero3=4"):
        text = str(explain(make_plan(module, example=example, plan=plan), graph))
        (line,) = lines_with(text, "a rank stores")
        kept[plan] = line

    assert len(set(kept.values())) == 4
    size = 4 * sum(parameter.numel() for parameter in module.parameters()) / 1024
    assert f"{size:.0f} KiB of parameters, {size:.0f} KiB of gradients, {2 * size:.0f} KiB" in kept["dp=4"]
    assert f"{size / 4:.1f} KiB of parameters, {size / 4:.1f} KiB of gradients" in kept["zero3=4"]


def test_two_all_reduces_a_block_and_direction(gpt):
    module, example, graph = gpt
    plan = make_plan(module, example=example, plan="tp=2")
    by_key = {(t.when, t.collective, t.axes): t.count for t in totals(explain(plan, graph).programs[0])}

    assert by_key["forward", "all_reduce", ("tp",)] == 2 * 2 + 1  # and the embedding, split on its rows
    assert by_key["backward", "all_reduce", ("tp",)] == 2 * 2 + 1  # and the head, split on its classes
    assert not any(collective == "all_gather" for _, collective, _ in by_key)


def test_zero3_gathers_each_parameter_twice_and_scatters_its_gradient(gpt):
    module, example, graph = gpt
    plan = make_plan(module, example=example, plan="zero3=2")
    by_key = {(t.when, t.collective): t.count for t in totals(explain(plan, graph).programs[0])}

    assert by_key["once a step", "all_gather"] == 2 * by_key["once a step", "reduce_scatter"]
    assert ("once a step", "all_reduce") not in by_key


def test_notes_are_shown(gpt):
    import dataclasses

    module, example, _ = gpt
    plan = dataclasses.replace(make_plan(module, example=example, plan="tp=2"), notes=("something fell back",))
    assert "- something fell back" in str(explain(plan))


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 * 2**20, "200 MiB"), (3 * 2**40, "3.0 TiB")],
)
def test_sizes_as_people_say_them(size, text):
    assert format_bytes(size) == text

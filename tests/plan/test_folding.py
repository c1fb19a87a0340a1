"""Names in a plan file: ops of a stage by module, runs of layers as one, and back again."""

from __future__ import annotations

import random

import pytest

from shardwright.errors import PlanError
from shardwright.plan.folding import cover, module_of, uncover
from shardwright.plan.stages import OpSequence
from tests.plan.graphs import analysis_of

LAYERS = [f"blocks.{number}.{part} / linear" for number in range(8) for part in ("up", "down")]


def test_the_module_of_an_op_is_before_the_slash_and_the_models_own_ops_are_in_none():
    assert module_of("blocks.0.attn / view.1") == "blocks.0.attn"
    assert module_of("blocks.0@2.attn / view") == "blocks.0.attn", "a second call is of the same module"
    assert module_of("/ add.1") == ""


def test_a_run_of_whole_layers_is_said_as_one():
    assert cover(["wte / embedding", *LAYERS[:12]], LAYERS[12:]) == ["wte", "blocks.0-5"]
    assert cover(LAYERS[12:14], LAYERS[:12] + LAYERS[14:]) == ["blocks.6"]


def test_a_layer_that_two_stages_share_is_said_by_its_parts():
    assert cover(LAYERS[:3], LAYERS[3:]) == ["blocks.0", "blocks.1.up"]
    assert cover(LAYERS[3:], LAYERS[:3]) == ["blocks.1.down", "blocks.2-7"]


def test_ranges_name_all_layers_from_the_first_to_the_last():
    assert uncover(["blocks.2-4"], LAYERS) == LAYERS[4:10]
    assert uncover(["blocks.7", "blocks.0-1"], LAYERS) == [*LAYERS[:4], *LAYERS[14:]], "in the order of the model"


def test_layers_of_a_sequence_at_the_root():
    names = [f"{number} / linear" for number in range(5)]

    assert cover(names[:3], names[3:]) == ["0-2"]
    assert uncover(["0-2"], names) == names[:3]


def test_a_models_own_ops_are_told_apart_by_their_numbers():
    """ "/ add" is the first of several, not a name for all of them."""
    names = ["/ add", "a / linear", "/ add.1", "/ add.2"]
    first, second = names[:2], names[2:]

    assert uncover(cover(first, second), names) == first
    assert uncover(cover(second, first), names) == second


@pytest.mark.parametrize("odd", ["3-4", "01", "07"])
def test_names_that_look_like_ranges_or_numbers(odd):
    names = [f"experts.{odd} / linear", "experts.8 / linear", "other / linear"]

    assert uncover(cover(names[:2], names[2:]), names) == names[:2]


def test_names_that_nothing_has_are_all_named():
    with pytest.raises(PlanError) as error:
        uncover(["blocks.6-9", "head", "blocks.0.up / gelu"], LAYERS)

    for unknown in ("blocks.8", "blocks.9", "head", "blocks.0.up / gelu"):
        assert f"{unknown!r} names nothing in the model" in str(error.value)


@pytest.mark.parametrize("name", ["gpt", "masked", "unet", "repeated", "resnet", "regularized", "hf_t5", "gpt_deep"])
def test_parts_of_a_model_are_found_again(name):
    line, drawn = OpSequence(analysis_of(name, 12)), random.Random(name)
    names = [op.name for op in line.graph.ops]
    for count in (2, 3, 5):
        parts = line.parts(sorted(drawn.sample(range(1, len(line.ops)), count - 1)))
        for number, part in enumerate(parts):
            others = [op for at, ops in enumerate(parts) if at != number for op in ops]
            assert uncover(cover(part, others), names) == list(part)

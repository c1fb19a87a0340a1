"""Which rank says and writes what, of a model whose stages are on ranks 0 and 1, and on 2 and 3."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.checkpoint.key_owners import KeyOwners
from shardwright.errors import InputError

from .little import little


def at(rank: int) -> KeyOwners:
    census = KeyOwners(little()[0])
    census.rank, census.world = rank, 4
    census._writers = {"first": (0, 1), "second": (2, 3), "all": (0, 1, 2, 3)}
    return census


def test_the_first_rank_of_each_stage_speaks():
    assert [at(rank).speaks for rank in range(4)] == [True, False, True, False]
    alone = at(0)
    alone._writers = {}
    assert alone.speaks


def test_a_parameter_is_written_by_the_ranks_that_hold_it():
    assert [at(rank).writes("second") for rank in range(4)] == [False, False, True, True]
    assert at(3).writes("of no stage")


def test_what_not_all_ranks_hold_comes_from_the_first_that_does():
    assert (at(0).source("second"), at(0).source("all"), at(0).source("of no stage")) == (2, None, None)


def test_tied_keys_are_kept_under_the_first():
    census = KeyOwners(little()[0])
    assert census.tied == {"head.weight": "up.weight"}
    assert "head.weight" not in census.tensors() and "up.weight" in census.tensors()
    assert census.shapes["up.weight"] == (6, 4) and "head.weight" not in census.shapes


def test_a_compiled_part_has_its_parameters_and_buffers_under_their_paths(tmp_path):
    net, _ = little()
    example = torch.randn(3, 4, dtype=torch.float64)
    compiled = sw.parallelize(little()[0], plan="single", example=(example,), compile={"directory": tmp_path})

    census, plain = KeyOwners(nn.ModuleDict({"net": compiled})), KeyOwners(net)

    assert census.first == {f"net.{key}": f"net.{first}" for key, first in plain.first.items()}
    assert census.shapes == {f"net.{key}": shape for key, shape in plain.shapes.items()}
    assert census.speaks and census.writes("net.up.weight")


class Extra(nn.Module):
    def get_extra_state(self):
        return {"steps": 3}


def test_a_state_dict_with_more_than_tensors_is_refused_with_a_remedy():
    with pytest.raises(InputError, match="_extra_state is a dict; save it with extra="):
        KeyOwners(Extra())


def test_parameters_have_the_order_of_the_model_and_others_come_behind():
    census = KeyOwners(little()[0])
    assert census.sorted({"zzz", "down.bias", "up.weight", "aaa"}) == ["up.weight", "down.bias", "aaa", "zzz"]


def test_a_parameter_of_another_model_is_named_by_its_shape():
    net, _ = little()
    assert KeyOwners(net).name_of(net.down.bias) == "down.bias"
    with pytest.raises(InputError, match=r"shape \(3,\) that the model does not have; save its state with extra="):
        KeyOwners(net).name_of(torch.nn.Parameter(torch.ones(3)))

"""Shards of parameters: sharding, put together again, and read from the words of a generated file."""

from __future__ import annotations

import pytest
import torch

from shardwright.errors import LayoutError
from shardwright.layout import REPLICATE, Axis, Block, Mesh, contiguous_shard, make_layout, make_shard
from shardwright.runtime.parameters.full_tensors import coordinates, gather_tensor, shard_tensor
from shardwright.runtime.parameters.table import ParameterEntry, parse, shard
from shardwright.runtime.world import Groups
from shardwright.storage import ParameterSpec, parse_storage, storage_layout, wanted_groups, zero_axes
from shardwright.storage.zero3 import Zero3
from tests.runtime.ranks import run_ranks

TP = Axis(name="tp", size=2)
MESH = Mesh(axes=(Axis(name="dp", size=2), TP))


def make_spec(shape, cuts, sums=(), zero=None, **others):
    layout, storage = make_layout(cuts, dict.fromkeys(sums, REPLICATE)), parse_storage(zero or {})
    return ParameterSpec(keys=("w",), shape=shape, dtype="float64", layout=layout, storage=storage, **others)


CASES = {
    "fused rows": make_spec((24, 3), [[make_shard(TP, [Block(3, 4, 2)])], []], sums=["dp"], zero={"dp": 3}),
    "uneven columns": make_spec((4, 5), [[], [contiguous_shard(TP, 5)]], sums=["dp"], zero={"dp": 3}),
    "zero on a dim that tp cuts unevenly": make_spec((5,), [[contiguous_shard(TP, 5)]], sums=["dp"], zero={"dp": 3}),
    "uneven zero": make_spec((3, 2), [[], []], sums=["dp"], zero={"dp": 3}),
    "an empty share": make_spec((1, 3), [[], [contiguous_shard(Axis(name="dp", size=2), 3)]]),
    "a scalar": make_spec((), [], sums=["dp"], zero={"dp": 3}),
    "zero over both axes": make_spec((5, 4), [[], []], sums=["dp", "tp"], zero={"dp": 3, "tp": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_gather_undoes_scatter(name):
    it = CASES[name]
    full = torch.randn(it.shape, dtype=torch.float64)

    def body(rank):
        groups = Groups(MESH)
        shard = shard_tensor(full, it, MESH.sizes, coordinates(groups))
        return shard.shape, gather_tensor(shard, it, groups)

    results = run_ranks(4, body)
    for _, whole in results:
        assert torch.equal(whole, full)
    if it.shape and name != "zero on a dim that tp cuts unevenly":
        assert all(shape.numel() < full.numel() for shape, _ in results)


def test_rows_of_a_fused_weight_are_three_runs():
    it = make_spec((12,), [[make_shard(TP, [Block(3, 4, 1)])]])
    shard = shard_tensor(torch.arange(12.0), it, MESH.sizes, {"dp": 0, "tp": 1})
    assert shard.tolist() == [2, 3, 6, 7, 10, 11]


def test_zero_cuts_are_minor_to_compute_cuts():
    it = make_spec((8,), [[contiguous_shard(TP, 8)]], sums=["dp"], zero={"dp": 3})
    assert [sharding.axis for sharding in storage_layout(it, MESH.sizes).shards[0]] == ["tp", "dp"]
    shard = shard_tensor(torch.arange(8.0), it, MESH.sizes, {"dp": 1, "tp": 0})
    assert shard.tolist() == [2, 3]


def test_zero_takes_the_first_dim_with_room():
    it = make_spec((1, 6, 8), [[], [], []], sums=["dp"], zero={"dp": 1})
    assert storage_layout(it, MESH.sizes).shard_of("dp")[0] == 1


def test_what_cannot_be_cut_stays_whole():
    assert zero_axes(CASES["a scalar"], MESH.sizes) == ()
    assert zero_axes(CASES["zero on a dim that tp cuts unevenly"], MESH.sizes) == ()


def test_zero_needs_a_summed_gradient():
    with pytest.raises(LayoutError, match=r"add 'dp' to its sums"):
        make_spec((4,), [[]], zero={"dp": 1})
    make_spec((4,), [[]], zero={"dp": 3}, trainable=False)


def test_groups_that_are_wanted():
    both = make_spec((4,), [[]], sums=["dp", "tp"], zero={"dp": 2})
    assert wanted_groups([both], MESH) == {("dp", "tp"), ("dp",), ("tp",)}


def test_parse_reads_the_words_of_a_generated_file():
    shards = {
        "wte.weight": ParameterEntry(shape=(10, 4), sums=("dp",), tied=("head.weight",)),
        "blocks.*.qkv.weight": ParameterEntry(
            shape=(24, 4), shards={0: shard("tp", 3, 4, 2)}, sums=("dp",), zero={"dp": 3}, unit="blocks.*"
        ),
        "blocks.*.proj.weight": ParameterEntry(shape=(4, 8), shards={1: shard("tp")}, frozen=True),
    }
    keys = ["wte.weight", "blocks.0.qkv.weight", "blocks.0.proj.weight", "blocks.1.qkv.weight", "head.weight"]
    actual = parse(shards, MESH, keys)
    assert [item.keys for item in actual] == [
        ("wte.weight", "head.weight"),
        ("blocks.0.qkv.weight",),
        ("blocks.0.proj.weight",),
        ("blocks.1.qkv.weight",),
    ]
    assert actual[3].unit == "blocks.1"
    assert actual[3].storage == Zero3(("dp",))
    assert actual[1].layout.shards[0] == (make_shard(TP, [Block(3, 4, 2)]),)
    assert actual[2].layout.shards[1] == (contiguous_shard(TP, 8),)
    assert not actual[2].trainable


def test_parse_names_every_key_that_is_not_described():
    with pytest.raises(LayoutError, match=r"(?s)b\.weight.*c\.weight"):
        parse({"a.weight": ParameterEntry(shape=(2,))}, MESH, ["a.weight", "b.weight", "c.weight"])


def test_a_cut_that_does_not_fit_is_refused():
    with pytest.raises(LayoutError, match="covers 24 elements, 20 are left"):
        parse({"w": ParameterEntry(shape=(20,), shards={0: shard("tp", 3, 4, 2)})}, MESH, ["w"])


def test_scatter_refuses_another_shape():
    with pytest.raises(LayoutError, match="has shape"):
        shard_tensor(torch.zeros(3), make_spec((4,), [[]]), MESH.sizes, {"dp": 0, "tp": 0})

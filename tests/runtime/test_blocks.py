"""Cutting and joining real tensors agrees with the spans of the layout algebra."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import Block, Shard
from shardwright.runtime.collectives import blocks

cuts = st.builds(
    lambda sections, repeat: Shard(axis="tp", blocks=tuple(sections), repeat=repeat),
    st.lists(st.builds(Block, st.integers(1, 3), st.integers(1, 7), st.integers(1, 3)), min_size=1, max_size=3),
    st.integers(1, 3),
)


def tensor(dim: int, size: int, strided: bool) -> torch.Tensor:
    shape = [2, 3, 2]
    shape[dim] = size
    x = torch.arange(float(torch.Size(shape).numel())).view(shape)
    return x.transpose(0, 2).contiguous().transpose(0, 2) if strided else x


def by_spans(x: torch.Tensor, dim: int, sharding: Shard, parts: int, index: int) -> torch.Tensor:
    kept = [i for start, length in sharding.spans(parts, index) for i in range(start, start + length)]
    return x.index_select(dim, torch.tensor(kept, dtype=torch.long))


@settings(max_examples=150, deadline=None)
@given(cuts, st.integers(1, 5), st.integers(-3, 2), st.booleans())
def test_take_keeps_the_spans_and_join_is_its_inverse(sharding: Shard, parts: int, dim: int, strided: bool) -> None:
    x = tensor(dim, sharding.elements, strided)

    shards = [blocks.shard(x, dim, sharding, parts, index) for index in range(parts)]

    for index, shard in enumerate(shards):
        assert torch.equal(shard, by_spans(x, dim, sharding, parts, index))
    assert torch.equal(blocks.unshard(shards, dim, sharding), x)


@settings(max_examples=100, deadline=None)
@given(cuts, st.integers(1, 5), st.integers(-3, 2), st.booleans())
def test_padded_stacks_go_there_and_back(sharding: Shard, parts: int, dim: int, strided: bool) -> None:
    x = tensor(dim, sharding.elements, strided)

    stacked = blocks.stack(x, dim, sharding, parts)

    assert stacked.is_contiguous()
    assert torch.equal(blocks.unstack(stacked, dim, sharding), x)
    for index in range(parts):
        shard = blocks.shard(x, dim, sharding, parts, index)
        assert torch.equal(stacked[index], blocks.fill(shard, dim, sharding, parts, index))


@settings(max_examples=50, deadline=None)
@given(cuts, st.integers(1, 5), st.integers(-3, 2))
def test_padded_shards_sum_to_the_whole(sharding: Shard, parts: int, dim: int) -> None:
    x = tensor(dim, sharding.elements, False)

    shards = [blocks.shard(x, dim, sharding, parts, index) for index in range(parts)]

    assert torch.equal(sum(blocks.zero_pad(shard, dim, sharding, parts, i) for i, shard in enumerate(shards)), x)


def test_one_run_is_a_view() -> None:
    x = torch.arange(12.0)

    shard = blocks.shard(x, 0, blocks.plain(12), 3, 1)

    assert shard.data_ptr() == x[4:].data_ptr()


def test_a_size_that_does_not_fit_the_cut_is_refused() -> None:
    with pytest.raises(LayoutError, match=r"shape \(5, 2\) should have 6 elements"):
        blocks.shard(torch.zeros(5, 2), 0, blocks.plain(6), 2, 0)


@settings(max_examples=100, deadline=None)
@given(cuts, st.integers(1, 5))
def test_positions_are_located_in_the_shard_that_holds_them(sharding: Shard, parts: int) -> None:
    x = torch.arange(sharding.elements)
    for index in range(parts):
        shard = blocks.shard(x, 0, sharding, parts, index)

        place, own = blocks.locate(x, sharding, parts, index)

        assert torch.equal(x[own], shard[place[own]].sort().values)
        assert int(own.sum()) == len(shard)
        assert not place[~own].any()


def test_positions_outside_of_the_dim_are_nowhere() -> None:
    _, own = blocks.locate(torch.tensor([-100, -1, 6, 7]), blocks.plain(6), 1, 0)
    assert not own.any()

"""Layouts against brute force: every claim of the algebra is checked on numpy arrays of indices."""

from __future__ import annotations

import copy
import math
import pickle
from itertools import pairwise, product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardwright.errors import LayoutError
from shardwright.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Axis,
    Block,
    Layout,
    Mesh,
    Partial,
    Shard,
    chunk_bounds,
    contiguous_shard,
    join_shards,
    local_region,
    make_layout,
    make_shard,
    replicated,
)
from tests.layout.drawn import factored, few, kept_indices, layouts, mesh_of, meshes, numbered, shape_of
from tests.layout.drawn import shard as held

small = st.integers(1, 4)
blocks = st.builds(Block, small, st.integers(1, 6), small)


def axis(size: int, name: str = "tp") -> Axis:
    return Axis(name=name, size=size)


# Shares and cuts.


@few
@given(st.integers(0, 40), st.integers(1, 9))
def test_a_share_is_what_torch_chunk_gives_and_empty_where_chunk_gives_nothing(size, parts):
    chunks = [part.tolist() for part in torch.arange(size).chunk(parts)] if size else []

    shares = [chunk_bounds(size, parts, index) for index in range(parts)]

    assert [list(range(start, start + length)) for start, length in shares if length] == chunks
    assert all(length == 0 for _, length in shares[len(chunks) :])


def test_five_units_on_four_devices_leave_the_last_one_empty():
    assert [chunk_bounds(5, 4, index)[1] for index in range(4)] == [2, 2, 1, 0]


@few
@given(st.lists(blocks, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 5), st.data())
def test_spans_and_local_size_are_those_of_the_index_array(row, repeat, parts, data):
    index = data.draw(st.integers(0, parts - 1))
    cut = Shard(axis="tp", blocks=tuple(row), repeat=repeat)

    spans = cut.spans(parts, index)

    assert [at for start, length in spans for at in range(start, start + length)] == kept_indices(cut, parts, index)
    assert cut.local(parts, index) == len(kept_indices(cut, parts, index))
    assert all(a + length < b for (a, length), (b, _) in pairwise(spans)), "neighbours are joined"


@few
@given(st.lists(blocks, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 5))
def test_a_shard_gives_every_element_to_exactly_one_device(row, repeat, parts):
    cut = Shard(axis="tp", blocks=tuple(row), repeat=repeat)

    everything = [at for index in range(parts) for at in kept_indices(cut, parts, index)]

    assert sorted(everything) == list(range(cut.elements))
    assert sum(cut.local(parts, index) for index in range(parts)) == cut.elements


@few
@given(st.lists(blocks, min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 5))
def test_the_canonical_form_shards_the_same_and_is_its_own_canonical_form(row, repeat, parts):
    shard = make_shard(axis(parts), row, repeat)
    loose = Shard(axis="tp", blocks=tuple(row), repeat=repeat)

    assert [shard.spans(parts, at) for at in range(parts)] == [loose.spans(parts, at) for at in range(parts)]
    assert make_shard(axis(parts), shard.blocks, shard.repeat) == shard


@few
@given(small, st.integers(1, 6), small, st.integers(1, 4))
def test_even_shards_that_take_the_same_elements_are_equal(outer, size, inner, parts):
    """8 units of 3, or 2 units of 12: cut in two they are one thing and compare equal."""
    size *= parts
    by_elements = make_shard(axis(parts), [Block(outer, parts, size // parts * inner)])

    assert make_shard(axis(parts), [Block(outer, size, inner)]) == by_elements
    assert make_shard(axis(parts), [Block(1, size, inner)], repeat=outer) == by_elements


def test_heads_of_a_fused_weight_are_three_runs():
    """(3 h e) with h=4, e=2: rank 1 has the last two heads of each section."""
    cut = make_shard(axis(2), [Block(3, 4, 2)])

    assert cut.spans(2, 1) == [(4, 4), (12, 4), (20, 4)]
    assert not cut.simple(2)
    assert contiguous_shard(axis(2), 24).simple(2)


def test_sections_of_different_width_are_each_sharded():
    """4 heads of queries, 2 of keys, 2 of values: every device gets its share of each."""
    cut = make_shard(axis(2), [Block(1, 4, 1), Block(1, 2, 1), Block(1, 2, 1)])

    assert cut.spans(2, 0) == [(0, 2), (4, 1), (6, 1)]
    assert cut.even(2)
    assert not make_shard(axis(2), [Block(1, 4, 1), Block(1, 3, 1)]).even(2)


# Order on one dim.


@few
@given(st.lists(st.integers(2, 3), min_size=2, max_size=3), st.lists(st.integers(1, 3), min_size=2, max_size=2), small)
def test_shards_that_continue_where_others_stop_are_one_shard_over_all_their_axes(sizes, sides, unit):
    axes = [Axis(name=f"a{at}", size=size) for at, size in enumerate(sizes)]
    mesh, (outer, inner) = Mesh(axes=tuple(axes)), sides
    left = math.prod(sizes) * unit
    cuts = []
    for axis in axes:
        cuts.append(make_shard(axis, [Block(outer, left, inner)]))
        left //= axis.size
    shape = (cuts[0].elements,)

    joined = join_shards(cuts, mesh.sizes)

    assert joined is not None
    layout = Layout(shards=(tuple(cuts),))
    for rank in range(mesh.size):
        assert local_region(layout, shape, mesh.sizes, mesh.coordinates(rank)).spans[0] == tuple(
            joined.spans(mesh.size, rank)
        )


def test_shards_of_two_factors_or_of_uneven_shares_are_not_one_shard():
    a, b = Axis(name="a", size=2), Axis(name="b", size=2)
    sizes = {"a": 2, "b": 2}

    assert join_shards([make_shard(a, [Block(1, 4, 8)]), make_shard(b, [Block(2, 8, 1)])], sizes) is None, "h, then e"
    assert join_shards([make_shard(a, [Block(1, 6, 8)]), make_shard(b, [Block(1, 3, 8)])], sizes) is None, "2, 1, 2, 1"
    fused = [Block(1, 4, 8), Block(1, 2, 8)]
    assert join_shards([make_shard(a, fused), make_shard(b, [Block(1, 8, 3)])], sizes) is None, "sections, then none"


def test_storage_axes_are_minor_to_compute_axes():
    """8 rows, tp for compute and dp for storage. Gathering dp must leave tp rank 0 the rows 0 to 3.

    With dp major it would leave rows 0, 1, 4, 5.
    """
    sizes, tp, dp = {"dp": 2, "tp": 2}, axis(2), axis(2, "dp")
    right = make_layout([[contiguous_shard(tp, 8), contiguous_shard(dp, 4)]])
    wrong = make_layout([[contiguous_shard(dp, 8), contiguous_shard(tp, 4)]])

    def rows_of_tp_rank_0(layout: Layout) -> list[int]:
        return [int(i) for d in range(2) for i in held(numbered((8,)), layout, sizes, {"tp": 0, "dp": d})]

    assert rows_of_tp_rank_0(right) == [0, 1, 2, 3]
    assert rows_of_tp_rank_0(wrong) == [0, 1, 4, 5]
    for layout, rows in ((right, [[0, 1], [2, 3]]), (wrong, [[0, 1], [4, 5]])):
        shards = [local_region(layout, (8,), sizes, {"tp": 0, "dp": d}) for d in range(2)]
        assert [[i for a, n in p.spans[0] for i in range(a, a + n)] for p in shards] == rows


# Shards.


@st.composite
def laid_out(draw):
    """A mesh, a shape and a layout of it."""
    mesh, factors = draw(meshes()), draw(factored())
    return mesh, shape_of(factors), draw(layouts(mesh, factors, placements=False))


@few
@given(laid_out())
def test_shards_cover_every_element_once_over_all_ranks(case):
    mesh, shape, layout = case
    counts = np.zeros(shape, dtype=int)

    for device in mesh.devices:
        shard = local_region(layout, shape, mesh.sizes, mesh.coordinates(device))
        for offset, _, sizes in shard.boxes:
            counts[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))] += 1

    copies = mesh.size // int(np.prod([mesh.sizes[name] for name in layout.axes]))
    assert (counts == copies).all()


@few
@given(laid_out())
def test_boxes_put_every_element_where_sharding_one_after_the_other_puts_it(case):
    mesh, shape, layout = case
    values = numbered(shape)

    for device in mesh.devices:
        at = mesh.coordinates(device)
        shard = local_region(layout, shape, mesh.sizes, at)
        local = np.full(shard.local_shape, -1)
        for offset, place, sizes in shard.boxes:
            there = tuple(slice(p, p + s) for p, s in zip(place, sizes, strict=True))
            local[there] = values[tuple(slice(o, o + s) for o, s in zip(offset, sizes, strict=True))]
        assert np.array_equal(local, held(values, layout, mesh.sizes, at))


@few
@given(laid_out())
def test_the_local_shape_is_that_of_the_shard(case):
    mesh, shape, layout = case
    for device in mesh.devices:
        at = mesh.coordinates(device)
        expected = held(numbered(shape), layout, mesh.sizes, at).shape
        assert local_region(layout, shape, mesh.sizes, at).local_shape == expected
        assert layout.local_shape(shape, mesh.sizes, at) == expected


def test_a_device_beyond_the_units_has_an_empty_shard_without_boxes():
    shard = local_region(make_layout([[contiguous_shard(axis(4), 5)], []]), (5, 3), {"tp": 4}, {"tp": 3})

    assert (shard.local_shape, shard.boxes) == ((0, 3), ())


def test_a_shard_that_counts_other_elements_than_the_dim_has_is_refused_with_both_numbers():
    with pytest.raises(LayoutError, match=r"8 elements over tp meets a dim of 6"):
        make_layout([[contiguous_shard(axis(2), 8)]]).local_shape((6,), {"tp": 2}, {"tp": 0})


# Layouts and meshes.


def test_layouts_that_say_the_same_are_equal_and_hash_alike():
    layout = make_layout([[], []], {"tp": INVARIANT, "dp": REPLICATE})
    two = make_layout([[], []], {"dp": REPLICATE})

    assert layout == two
    assert hash(layout) == hash(two)
    assert layout.placement("tp") == INVARIANT
    assert layout.axes == {"dp"}


def test_the_gradient_of_a_replicate_value_is_a_sum_and_of_a_partial_one_replicated():
    layout = make_layout([[contiguous_shard(axis(2), 4)]], {"dp": REPLICATE, "ep": PARTIAL})

    gradient = layout.gradient()

    assert gradient.shards == layout.shards
    assert dict(gradient.rest) == {"dp": PARTIAL}


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: make_layout([[contiguous_shard(axis(2), 4)], [contiguous_shard(axis(2), 4)]]),
        lambda: make_layout([[contiguous_shard(axis(2), 4)]], {"tp": PARTIAL}),
        lambda: Layout(shards=((),), rest=(("tp", INVARIANT),)),
        lambda: Layout(shards=((),), rest=(("tp", PARTIAL), ("dp", PARTIAL))),
    ],
)
def test_an_axis_is_used_once_and_the_rest_is_canonical(wrong):
    with pytest.raises(LayoutError):
        wrong()


def test_a_layout_prints_its_axes_dim_by_dim():
    layout = make_layout([[contiguous_shard(axis(2), 4)], []], {"dp": REPLICATE, "ep": Partial("max")})

    assert str(layout) == "[tp, .] (dp: replicate, ep: partial max)"
    assert str(replicated(2)) == "[., .]"


@few
@given(st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_coordinates_count_the_last_axis_fastest_and_groups_differ_in_the_named_axes_only(sizes):
    mesh = mesh_of(**{f"a{i}": size for i, size in enumerate(sizes)})

    places = [tuple(mesh.coordinates(device).values()) for device in mesh.devices]

    assert places == list(product(*(range(size) for size in sizes)))
    for names in (("a0",), mesh.names[-1:], mesh.names):
        groups = mesh.groups(names)
        assert sorted(device for group in groups for device in group) == list(mesh.devices)
        for group in groups:
            fixed = {tuple(v for k, v in mesh.coordinates(d).items() if k not in names) for d in group}
            assert len(fixed) == 1


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        (lambda: Axis(name="t p", size=2), "not an identifier"),
        (lambda: Axis(name="tp", size=0), "size 0"),
        (lambda: mesh_of(tp=2).axis("dp"), "no axis 'dp'"),
        (lambda: Mesh(axes=(axis(2), axis(3))), "repeat"),
        (lambda: Mesh(axes=(axis(2),), devices=(0, 1, 2)), "needs 2 distinct devices, got 3"),
    ],
)
def test_a_mesh_that_makes_no_sense_is_refused(wrong, why):
    with pytest.raises(LayoutError, match=why):
        wrong()


def test_a_layout_takes_no_hash_along_to_another_process():
    layout = make_layout([[contiguous_shard(axis(2), 4)], []], {"dp": REPLICATE})
    sent = pickle.dumps(layout)
    assert b"_hash" not in sent
    document = pickle.loads(sent)
    assert document == layout and hash(document) == hash(layout) and copy.deepcopy(layout) == layout

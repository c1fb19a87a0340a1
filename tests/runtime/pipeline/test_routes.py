"""Routes between meshes: every receiver gets every element of its shard once, from a rank that holds it."""

from collections import Counter

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.layout import Axis, Block, Mesh, contiguous_shard, local_region, make_layout, make_shard
from shardwright.runtime.collectives import blocks
from shardwright.runtime.pipeline.routes import routes

SHAPE = (12, 18)
CUTS = {12: [(1, 12, 1), (3, 4, 1), (2, 3, 2)], 18: [(1, 18, 1), (3, 3, 2), (2, 9, 1)]}


@st.composite
def side(draw, ranks=8):
    """A mesh of 1 to 6 of some ranks, in any order, and a layout on it: sharded in blocks, unevenly, twice, or not."""
    sizes = draw(st.sampled_from([(1,), (2,), (3,), (4,), (5,), (2, 2), (3, 2), (2, 3), (1, 3)]))
    axes = tuple(Axis(name=f"a{i}", size=size) for i, size in enumerate(sizes))
    count = 1
    for size in sizes:
        count *= size
    devices = tuple(draw(st.permutations(range(ranks)))[:count])
    mesh = Mesh(axes=axes, devices=devices)
    cuts = [[] for _ in SHAPE]
    left = list(SHAPE)
    for axis in axes:
        dim = draw(st.sampled_from([None, 0, 1]))
        if dim is None:
            continue
        if cuts[dim]:
            if any(
                not sharding.even(dict(zip(mesh.names, sizes, strict=True))[sharding.axis]) for sharding in cuts[dim]
            ):
                continue  # nothing is minor to an uneven sharding
            sharding = contiguous_shard(axis, left[dim])
        else:
            sharding = make_shard(axis, [Block(*draw(st.sampled_from(CUTS[SHAPE[dim]])))])
        cuts[dim].append(sharding)
        left[dim] = sharding.local(axis.size, 0)
    return mesh, make_layout(cuts)


def local(x, layout, mesh, rank):
    """The shard of a rank, sharding by the other implementation."""
    at, sizes = mesh.coordinates(rank), mesh.sizes
    for dim, cuts in enumerate(layout.shards):
        for sharding in cuts:
            x = blocks.shard(x, dim, sharding, sizes[sharding.axis], at[sharding.axis])
    return x.contiguous()


@settings(max_examples=300, deadline=None)
@given(side(), side())
def test_every_element_arrives_once_from_a_holder(source, destination):
    (sender, stored), (receiver, wanted) = source, destination
    x = torch.arange(12 * 18).view(SHAPE)
    outs = {rank: torch.full_like(local(x, wanted, receiver, rank), -1) for rank in receiver.devices}
    filled = {rank: torch.zeros_like(out) for rank, out in outs.items()}
    for leg in routes(stored, sender, wanted, receiver, SHAPE):
        mine = local(x, stored, sender, leg.source)
        message = leg.pack(mine)
        assert message.is_contiguous() and message.numel() == leg.elements > 0
        straight = leg.straight(outs[leg.target])
        if straight is not None:
            straight.copy_(message.view(straight.shape))
        else:
            leg.unpack(message, outs[leg.target])
        leg.carry(torch.ones_like(mine), (once := torch.zeros_like(outs[leg.target])))
        filled[leg.target] += once
    for rank, out in outs.items():
        assert torch.equal(out, local(x, wanted, receiver, rank))
        assert (filled[rank] == 1).all()


@settings(max_examples=200, deadline=None)
@given(side(), side())
def test_a_rank_takes_from_itself_what_it_has(source, destination):
    (sender, stored), (receiver, wanted) = source, destination
    at = {rank: local_region(stored, SHAPE, sender.sizes, sender.coordinates(rank)) for rank in sender.devices}
    for leg in routes(stored, sender, wanted, receiver, SHAPE):
        if leg.target in at and at[leg.target] == at[leg.source]:
            assert leg.source == leg.target


@settings(max_examples=200, deadline=None)
@given(side(), side())
def test_copies_share_the_sending(source, destination):
    (sender, stored), (receiver, wanted) = source, destination
    sends = Counter()
    for leg in routes(stored, sender, wanted, receiver, SHAPE):
        if leg.source != leg.target:
            sends[leg.source] += 1
    shards = {}
    for rank in sender.devices:
        shard = local_region(stored, SHAPE, sender.sizes, sender.coordinates(rank))
        shards.setdefault(shard, []).append(rank)
    for ranks in shards.values():
        loads = [sends[rank] for rank in ranks]
        assert max(loads) - min(loads) <= 1


def test_equal_layouts_pair_ranks_of_the_same_place():
    dp, tp = Axis(name="dp", size=2), Axis(name="tp", size=2)
    layout = make_layout([[contiguous_shard(dp, 12)], []])
    first, second = (Mesh(axes=(dp, tp), devices=devices) for devices in ((0, 1, 2, 3), (4, 5, 6, 7)))
    legs = routes(layout, first, layout, second, SHAPE)
    assert [(leg.source, leg.target, leg.same) for leg in legs] == [(k, k + 4, True) for k in range(4)]
    back = routes(layout, second, layout, first, SHAPE)
    assert [(leg.source, leg.target) for leg in back] == [(k + 4, k) for k in range(4)]


def test_one_to_three_and_back():
    mesh = Mesh(axes=(Axis(name="tp", size=1),), devices=(5,))
    three = Mesh(axes=(Axis(name="tp", size=3),), devices=(0, 1, 2))
    rows = make_layout([[contiguous_shard(three.axes[0], 12)], []])
    whole = make_layout([[], []])
    assert [(leg.source, leg.target, leg.elements) for leg in routes(whole, mesh, rows, three, SHAPE)] == [
        (5, rank, 4 * 18) for rank in range(3)
    ]
    assert [(leg.source, leg.target, leg.elements) for leg in routes(rows, three, whole, mesh, SHAPE)] == [
        (rank, 5, 4 * 18) for rank in range(3)
    ]


def test_a_scalar_and_nothing():
    mesh = Mesh(axes=(), devices=(3,))
    destination = Mesh(axes=(Axis(name="tp", size=2),), devices=(3, 4))
    assert [
        (leg.source, leg.target, leg.elements)
        for leg in routes(make_layout([]), mesh, make_layout([]), destination, ())
    ] == [
        (3, 3, 1),
        (3, 4, 1),
    ]
    assert routes(make_layout([[]]), mesh, make_layout([[]]), destination, (0,)) == ()

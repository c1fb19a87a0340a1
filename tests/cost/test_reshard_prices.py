"""One price of reshards: what lowering does costs no more than what the planner has counted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shardwright.cluster import find
from shardwright.cost.reshard_prices import BytePrices, prices_of
from shardwright.cost.reshard_search import cheapest_path, cheapest_tree
from shardwright.cost.reshard_tables import ReshardTables
from shardwright.cost.resources import Resource
from shardwright.layout import INVARIANT, PARTIAL, REPLICATE, Axis, Layout, Mesh, contiguous_shard, make_layout
from tests.layout.drawn import layouts, mesh_of, shape_of

BYTES = 1 << 20
MESH = mesh_of(x=2, y=4)


def layout(**rest) -> Layout:
    return make_layout([[], []], rest)


def price(start: Layout, goal: Layout) -> tuple[float, float]:
    """Seconds that are waited for, forward and backward."""
    used = ReshardTables(MESH, find("8xA100-80GB")).prices([start, layout()], [layout(), goal], BYTES, True)[0, 1]
    return used[Resource.SEND_FORWARD], used[Resource.SEND_BACKWARD]


@pytest.mark.parametrize(
    ("start", "goal", "sums"),
    [
        (layout(x=PARTIAL, y=PARTIAL), layout(), (1, 0)),
        (layout(), layout(x=REPLICATE, y=REPLICATE), (0, 1)),
        (layout(x=PARTIAL, y=PARTIAL), layout(x=REPLICATE, y=REPLICATE), (1, 1)),
    ],
)
def test_a_sum_over_two_axes_is_one_over_both(start, goal, sums):
    moves = ReshardTables(MESH, find("8xA100-80GB"))
    once = moves.waited("all_reduce", BYTES, ("x", "y"))

    assert price(start, goal) == pytest.approx(tuple(count * once for count in sums))
    assert once < moves.waited("all_reduce", BYTES, ("x",)) + moves.waited("all_reduce", BYTES, ("y",))


def test_different_sums_are_made_one_after_the_other():
    moves = ReshardTables(MESH, find("8xA100-80GB"))
    apart = [moves.waited("all_reduce", BYTES, (axis,)) for axis in "xy"]

    assert price(layout(x=PARTIAL), layout(y=REPLICATE)) == pytest.approx(tuple(apart))


# What lowering does, and what the planner counts.

CLUSTERS = ("64x8xA100-80GB", "256x2xH100", "cpu:512")
drawn_often = settings(max_examples=150, deadline=None)


@st.composite
def values(draw: Any, most: int) -> tuple[ReshardTables, tuple[int, ...], int, bool, list[Layout]]:
    """Prices on a mesh, and a value: its shape, the size of an element, whether it has a gradient, some layouts of it.

    Sizes of axes and dims need not divide, and several axes may take one factor of a dim.
    """
    sizes = draw(st.lists(st.integers(2, 8), min_size=1, max_size=3))
    mesh = mesh_of(**dict(zip(("dp", "tp", "ep"), sizes, strict=False)))
    factor = st.lists(st.sampled_from([2, 3, 4, 5, 6, 8, 16]), min_size=1, max_size=2)
    factors = tuple(tuple(draw(factor)) for _ in range(draw(st.integers(1, 3))))
    placed = [draw(layouts(mesh, factors)) for _ in range(draw(st.integers(2, most)))]
    prices = ReshardTables(mesh, find(draw(st.sampled_from(CLUSTERS))))
    return prices, shape_of(factors), draw(st.sampled_from([4, 4096, 2**22])), draw(st.booleans()), placed


def planned(prices: ReshardTables, start: Layout, goal: Layout, bytes: float, gradient: bool) -> float:
    return float(prices.prices([start], [goal], bytes, gradient)[0, 0].sum())


@drawn_often
@given(values(most=2))
def test_no_reshard_is_lowered_to_more_than_its_price(value):
    prices, shape, item, gradient, (start, goal) = value
    bytes = float(math.prod(shape) * item)

    lowered = cheapest_tree(start, [goal], shape, item, prices, gradient).cost

    assert lowered <= planned(prices, start, goal, bytes, gradient) * (1 + 1e-9)


@drawn_often
@given(values(most=5))
def test_no_value_with_several_uses_is_lowered_to_more_than_its_price_by_way_of_any_hub(value):
    prices, shape, item, gradient, (start, *goals) = value
    bytes = float(math.prod(shape) * item)

    lowered = cheapest_tree(start, goals, shape, item, prices, gradient).cost

    for hub in (start, *goals):
        uses = sum(planned(prices, hub, goal, bytes, gradient) for goal in goals)
        assert lowered <= (planned(prices, start, hub, bytes, gradient) + uses) * (1 + 1e-9)


@drawn_often
@given(values(most=5))
def test_a_table_of_many_pairs_has_the_price_of_each(value):
    prices, shape, item, gradient, placed = value
    bytes = float(math.prod(shape) * item)

    table = prices.prices(placed, placed, bytes, gradient)

    alone = [[prices.prices([start], [goal], bytes, gradient)[0, 0] for goal in placed] for start in placed]
    np.testing.assert_allclose(table.sum(-1), np.array(alone).sum(-1), rtol=1e-9)


X, Y = (contiguous_shard(axis, 16) for axis in MESH.axes)


def test_of_two_axes_that_change_places_on_a_dim_one_is_lifted():
    """Each takes the factor that the other has, so neither can come first: an order of axes does not do it."""
    prices = ReshardTables(MESH, find("8xA100-80GB"))
    start = make_layout([[X, contiguous_shard(MESH.axes[1], 8)]])
    goal = make_layout([[Y, contiguous_shard(MESH.axes[0], 4)]])

    path = cheapest_path(start, goal, BYTES, prices, True)

    assert [(step.kind, step.axes) for step in path.steps] == [("all_gather", ("x", "y")), ("shard", ("y", "x"))]
    assert path.cost <= planned(prices, start, goal, BYTES, True) < 1.2 * path.cost


def test_a_shard_waits_until_another_axis_has_left_its_factor():
    """y can't take rows of 4 while x has halves: gathering y's small share first is not a path."""
    prices = ReshardTables(MESH, find("8xA100-80GB"))
    start, goal = make_layout([[X], []]), make_layout([[Y], []])

    path = cheapest_path(start, goal, BYTES, prices, True)

    assert [(step.kind, step.axes) for step in path.steps] == [("all_gather", ("x",)), ("shard", ("y",))]
    assert planned(prices, start, goal, BYTES, True) == pytest.approx(path.cost)


def test_a_sum_that_several_uses_need_is_made_once():
    total = make_layout([[], []], {"x": PARTIAL, "y": PARTIAL})
    half, none = make_layout([[], []], {"y": PARTIAL}), make_layout([[], []])

    tree = cheapest_tree(total, [none, half], (64, 64), 4, BytePrices(MESH.sizes), True)

    assert [(step.kind, step.axes) for _, step in tree.branches] == [("all_reduce", ("x", "y")), ("partial", ("y",))]


def test_by_way_of_a_hub_a_pending_sum_is_reduced_before_its_uses_part():
    """Each use alone would scatter the sum; scattering it once and exchanging shards sends less than twice that."""
    mesh = mesh_of(x=2)
    (axis,) = mesh.axes
    rows, columns = make_layout([[contiguous_shard(axis, 64)], []]), make_layout([[], [contiguous_shard(axis, 64)]])

    tree = cheapest_tree(
        make_layout([[], []], {"x": PARTIAL}), [rows, columns], (64, 64), 4096, BytePrices(mesh.sizes), True
    )

    assert [step.kind for _, step in tree.branches] == ["reduce_scatter", "all_to_all"]


def test_without_a_cluster_prices_are_bytes_and_with_one_seconds():
    mesh = Mesh(axes=(Axis(name="tp", size=4),))

    assert isinstance(prices_of(mesh, None), BytePrices)
    seconds = prices_of(mesh, find("4xA100-80GB")).step("all_reduce", ("tp",), BYTES, True)
    assert 0.0 < seconds[2] < 1.0 < prices_of(mesh, None).step("all_reduce", ("tp",), BYTES, True)[2]


def test_between_microbatches_nothing_is_sent_but_what_all_ranks_have():
    mesh = Mesh(axes=(Axis(name="mb", size=4), Axis(name="dp", size=2)))
    prices = prices_of(mesh, find("2xA100-80GB"), Mesh(axes=(Axis(name="dp", size=2),)))
    start = make_layout([[]], {"mb": PARTIAL})

    assert cheapest_path(start, make_layout([[]]), BYTES, prices, True).cost > 1e5
    assert cheapest_path(start, make_layout([[]]), BYTES, prices, False).cost < 1e-3
    assert start.placement("dp") == INVARIANT

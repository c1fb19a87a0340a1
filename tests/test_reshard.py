"""Converters, simulated on all ranks: forward they give the goal's shards, backward the start's gradient."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.cluster import find
from shardwright.cost.reshard_prices import BytePrices, prices_of
from shardwright.cost.reshard_search import cheapest_tree, find_reshards, step_price
from shardwright.errors import LayoutError
from shardwright.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Axis,
    Block,
    Layout,
    Partial,
    contiguous_shard,
    make_layout,
    make_shard,
    replicated,
)
from shardwright.reshard import forget_gradient, reordered, same_placement
from tests.layout.drawn import factored, few, layouts, meshes, numbered, shape_of, shard
from tests.layout.simulated import FORWARD, assert_lies, backward, forward, spread

TP, DP = Axis(name="tp", size=2), Axis(name="dp", size=2)


@st.composite
def conversions(draw):
    """A mesh, a shape, and two layouts of it. Both cut one factorisation, as the ops of a model do."""
    mesh, factors = draw(meshes()), draw(factored())
    return mesh, shape_of(factors), draw(layouts(mesh, factors)), draw(layouts(mesh, factors))


def steps_between(start: Layout, goal: Layout, shape, sizes, gradient: bool = True):
    return find_reshards(start, goal, shape, 4, BytePrices(sizes), gradient).steps


@st.composite
def priced_conversions(draw):
    """A conversion, and the steps of it by bytes or on a cluster; from two nodes on paths differ with the bytes."""
    mesh, shape, start, goal = draw(conversions())
    cluster, item = draw(st.sampled_from([None, "cpu:27", "9x3xA100-80GB"])), draw(st.sampled_from([4, 2**16, 2**26]))
    prices = prices_of(mesh, find(cluster) if cluster else None)
    return mesh, shape, start, goal, find_reshards(start, goal, shape, item, prices, True).steps


def kinds(steps) -> list[str]:
    return [step.kind for step in steps]


# Every pair of layouts.


@few
@given(priced_conversions())
def test_there_is_a_way_between_any_two_layouts_and_it_brings_the_value_there(case):
    mesh, shape, start, goal, steps = case
    random = np.random.default_rng(0)
    value = random.integers(-99, 99, shape)

    assert_lies(forward(steps, spread(value, start, mesh, random), mesh), value, goal, mesh)


@few
@given(priced_conversions())
def test_on_the_way_back_the_gradient_arrives_in_the_layout_that_the_start_promises(case):
    mesh, shape, start, goal, steps = case
    random = np.random.default_rng(0)
    gradient = random.integers(-99, 99, shape)

    schedule = spread(gradient, goal.gradient(), mesh, random)
    assert_lies(backward(steps, schedule, mesh), gradient, start.gradient(), mesh)


@few
@given(priced_conversions())
def test_every_step_on_the_way_ends_in_the_layout_it_names(case):
    mesh, shape, start, _, steps = case
    random = np.random.default_rng(0)
    value = random.integers(-99, 99, shape)
    schedule = spread(value, start, mesh, random)

    for step in steps:
        schedule = forward([step], schedule, mesh)
        assert_lies(schedule, value, step.after, mesh)


@few
@given(conversions())
def test_a_value_without_a_gradient_needs_no_step_for_one(case):
    mesh, shape, start, goal = case
    random = np.random.default_rng(0)
    value = random.integers(-99, 99, shape)

    steps = steps_between(start, goal, shape, mesh.sizes, gradient=False)

    assert not {"replicate", "all_reduce_to_r", "all_gather_to_r", "invariant", "shard_from_r"} & set(kinds(steps))
    end = forward(steps, spread(value, forget_gradient(start), mesh, random), mesh)
    assert_lies(end, value, forget_gradient(goal), mesh)


@few
@given(conversions())
def test_no_way_is_dearer_than_the_one_through_whole(case):
    mesh, shape, start, goal = case
    middle = replicated(len(shape))

    prices = BytePrices(mesh.sizes)

    path = find_reshards(start, goal, shape, 4, prices, True)
    there = find_reshards(start, middle, shape, 4, prices, True)
    back = find_reshards(middle, goal, shape, 4, prices, True)

    assert path.cost <= there.cost + back.cost + 1e-6
    before, total = start, 0.0
    for step in path.steps:
        total += sum(step_price(step, before, float(np.prod(shape) * 4), prices, True))
        before = step.after
    assert total == pytest.approx(path.cost)


# Several uses.


@st.composite
def uses(draw):
    mesh, factors = draw(meshes()), draw(factored())
    goals = [draw(layouts(mesh, factors)) for _ in range(draw(st.integers(1, 4)))]
    return mesh, shape_of(factors), draw(layouts(mesh, factors)), list(dict.fromkeys(goals))


@few
@given(uses(), st.sampled_from([None, "9x3xA100-80GB"]), st.sampled_from([4, 2**26]))
def test_a_tree_gives_each_use_its_layout_and_the_producer_the_sum_of_their_gradients(case, cluster, item):
    mesh, shape, start, goals = case
    random = np.random.default_rng(0)
    value, *gradients = (random.integers(-99, 99, shape) for _ in range(len(goals) + 1))
    prices = prices_of(mesh, find(cluster) if cluster else None)

    tree = cheapest_tree(start, goals, shape, item, prices, True)

    forms = [spread(value, start, mesh, random)]
    for parent, step in tree.branches:
        forms.append(forward([step], forms[parent], mesh))
    backs = [dict.fromkeys(mesh.devices, 0) for _ in forms]
    for goal, gradient in zip(goals, gradients, strict=True):
        assert_lies(forms[tree.ends[goal]], value, goal, mesh)
        terms = spread(gradient, goal.gradient(), mesh, random)
        backs[tree.ends[goal]] = {device: backs[tree.ends[goal]][device] + terms[device] for device in mesh.devices}
    for at in reversed(range(1, len(forms))):
        if not all(np.isscalar(array) for array in backs[at].values()):
            parent, step = tree.branches[at - 1]
            terms = backward([step], backs[at], mesh)
            backs[parent] = {device: backs[parent][device] + terms[device] for device in mesh.devices}
    assert_lies(backs[0], sum(gradients), start.gradient(), mesh)


# The table of section 4: one axis, one step.

ROWS = make_layout([[contiguous_shard(TP, 8)], []])
COLUMNS = make_layout([[], [contiguous_shard(TP, 6)]])
AT = {
    name: make_layout([[], []], {"tp": value}) for name, value in (("I", INVARIANT), ("R", REPLICATE), ("P", PARTIAL))
}
AT |= {"S": ROWS, "S'": COLUMNS}


@pytest.mark.parametrize(
    ("start", "goal", "expected"),
    [
        ("P", "I", "all_reduce"),
        ("I", "R", "replicate"),
        ("P", "R", "all_reduce_to_r"),
        ("S", "I", "all_gather"),
        ("S", "R", "all_gather_to_r"),
        ("I", "S", "shard"),
        ("R", "S", "shard_from_r"),
        ("P", "S", "reduce_scatter"),
        ("S", "P", "zero_pad"),
        ("S", "S'", "all_to_all"),
        ("I", "P", "partial"),
        ("R", "I", "invariant"),
    ],
)
def test_each_row_of_the_table_is_one_step(start, goal, expected):
    assert kinds(steps_between(AT[start], AT[goal], (8, 6), {"tp": 2})) == [expected]


def test_the_simulator_knows_every_kind_that_the_table_has():
    assert len(FORWARD) == 12


def test_a_bias_that_is_only_sent_through_is_not_summed_and_cut_in_two_steps():
    """All_reduce and slice is what a naive lowering does; reduce_scatter moves half of it."""
    (step,) = steps_between(AT["P"], AT["S"], (8, 6), {"tp": 2})
    naive = [*steps_between(AT["P"], AT["I"], (8, 6), {"tp": 2}), *steps_between(AT["I"], AT["S"], (8, 6), {"tp": 2})]

    assert step.kind == "reduce_scatter"
    assert kinds(naive) == ["all_reduce", "shard"]
    prices = BytePrices({"tp": 2})
    assert sum(step_price(step, AT["P"], 1e9, prices, False)) < sum(step_price(naive[0], AT["P"], 1e9, prices, False))


def test_a_cut_of_other_blocks_on_the_same_dim_is_gathered_and_taken_anew():
    plain = make_layout([[contiguous_shard(TP, 12)]])
    heads = make_layout([[make_shard(TP, [Block(3, 4, 1)])]])

    assert kinds(steps_between(plain, heads, (12,), {"tp": 2})) == ["all_gather", "shard"]


def test_a_maximum_is_reduced_as_a_maximum_and_never_scattered():
    start = make_layout([[]], {"tp": Partial("max")})

    steps = steps_between(start, make_layout([[contiguous_shard(TP, 8)]]), (8,), {"tp": 2}, gradient=False)

    assert kinds(steps) == ["reduce", "shard"]
    assert steps[0].reduction == "max"


BOTH = {"dp": 2, "tp": 4}


@pytest.mark.parametrize(
    ("placement", "there", "back"),
    [(INVARIANT, "all_gather", "shard"), (REPLICATE, "all_gather_to_r", "shard_from_r")],
)
def test_shards_of_two_axes_that_are_one_together_are_gathered_and_taken_at_once(placement, there, back):
    split = make_layout([[contiguous_shard(DP, 8), make_shard(Axis(name="tp", size=4), [Block(1, 4, 1)])]])
    copies = make_layout([[]], {"dp": placement, "tp": placement})

    (gather,) = steps_between(split, copies, (8,), BOTH)
    (take,) = steps_between(copies, split, (8,), BOTH)

    assert (gather.kind, gather.axes, gather.sharding.blocks) == (there, ("dp", "tp"), (Block(1, 8, 1),))
    assert (take.kind, take.axes, take.sharding.blocks) == (back, ("dp", "tp"), (Block(1, 8, 1),))


def test_shards_of_two_factors_are_gathered_one_after_the_other():
    """Heads, and the width in each: no one shard over both axes leaves a device with that."""
    heads, width = make_shard(Axis(name="tp", size=4), [Block(1, 8, 2)]), make_shard(DP, [Block(2, 2, 1)])

    steps = steps_between(make_layout([[heads, width]]), replicated(1), (16,), BOTH)

    assert kinds(steps) == ["all_gather", "all_gather"]


def test_a_major_shard_is_added_under_a_minor_one_of_another_factor():
    """dp comes last, though the goal has it first, so that tp is gathered by half as much."""
    goal = make_layout([[make_shard(DP, [Block(1, 2, 4)]), make_shard(Axis(name="tp", size=4), [Block(1, 4, 1)])], []])
    start = make_layout([[make_shard(Axis(name="tp", size=4), [Block(2, 4, 1)])], []])

    (step,) = steps_between(start, goal, (8, 3), BOTH)

    assert (step.kind, step.axes, step.sharding.blocks, step.after) == ("shard", ("dp",), (Block(1, 2, 1),), goal)


def test_only_the_minor_most_axis_of_a_dim_is_gathered_directly():
    sizes = {"dp": 2, "tp": 2}
    stored = make_layout([[contiguous_shard(TP, 8), contiguous_shard(DP, 4)]])
    wrong = make_layout([[contiguous_shard(DP, 8), contiguous_shard(TP, 4)]])
    wanted = make_layout([[contiguous_shard(TP, 8)]])

    assert kinds(steps_between(stored, wanted, (8,), sizes)) == ["all_gather"]
    assert len(steps_between(wrong, wanted, (8,), sizes)) > 1, "dp major can't give tp rank 0 its rows in one step"


def test_what_can_not_be_cut_so_is_refused_with_both_layouts_and_the_shape():
    with pytest.raises(LayoutError, match=r"no way from \[\.\] to \[tp\] for a shape of \[6\]"):
        steps_between(replicated(1), make_layout([[contiguous_shard(TP, 8)]]), (6,), {"tp": 2})


# Saying the same in another order.


@few
@given(conversions(), st.data())
def test_a_reordered_layout_puts_the_same_elements_in_the_same_places(case, data):
    mesh, shape, layout, _ = case
    axis = data.draw(st.sampled_from(mesh.names))

    moved = reordered(layout, axis, mesh.sizes)

    assume(moved is not None)
    dim, cut = moved.shard_of(axis)
    assert moved.shards[dim][-1] == cut
    for device in mesh.devices:
        at = mesh.coordinates(device)
        first, other = (shard(numbered(shape), it, mesh.sizes, at) for it in (layout, moved))
        assert np.array_equal(first, other)
    assert same_placement(layout, moved, mesh.sizes)


@few
@given(conversions())
def test_layouts_that_are_called_the_same_are_the_same_on_every_device(case):
    mesh, shape, first, other = case
    alike = all(
        np.array_equal(*(shard(numbered(shape), it, mesh.sizes, mesh.coordinates(d)) for it in (first, other)))
        for d in mesh.devices
    )

    if same_placement(first, other, mesh.sizes):
        assert alike
        assert first.rest == other.rest


def test_two_even_cuts_may_be_said_in_either_order_if_each_is_said_anew():
    """The heads, then the width within a head, or the width of every head, then the heads."""
    sizes = {"dp": 2, "tp": 2}
    heads_then_width = make_layout([[make_shard(TP, [Block(1, 4, 6)]), make_shard(DP, [Block(2, 6, 1)])]])
    width_then_heads = make_layout([[make_shard(DP, [Block(4, 6, 1)]), make_shard(TP, [Block(1, 4, 3)])]])

    assert same_placement(heads_then_width, width_then_heads, sizes)
    assert reordered(heads_then_width, "tp", sizes) == width_then_heads


def test_the_same_cuts_in_another_order_are_another_layout():
    """Rows 0, 1 and 4, 5 again: swapping the names of two axes swaps the rows."""
    layout = make_layout([[contiguous_shard(TP, 8), contiguous_shard(DP, 4)]])
    other = make_layout([[contiguous_shard(DP, 8), contiguous_shard(TP, 4)]])

    assert not same_placement(layout, other, {"dp": 2, "tp": 2})


def test_an_uneven_cut_keeps_its_place():
    uneven = make_layout([[contiguous_shard(TP, 10), contiguous_shard(DP, 5)]])

    assert reordered(uneven, "tp", {"dp": 2, "tp": 2}) is None
    assert reordered(uneven, "dp", {"dp": 2, "tp": 2}) == uneven

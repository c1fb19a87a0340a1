"""What conversions over several axes cost."""

from __future__ import annotations

import pytest

from shardwright.cluster import find
from shardwright.cost.reshard_tables import ReshardTables
from shardwright.cost.resources import Resource
from shardwright.layout import PARTIAL, REPLICATE, Layout, make_layout
from tests.layout.drawn import mesh_of

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

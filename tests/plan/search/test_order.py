"""Which variables stand on borders, and in which order they go."""

from __future__ import annotations

import numpy as np

from shardwright.plan.search.order import Borders, split_variables
from tests.plan.search.drawn import repeat


def test_one_variable_of_each_layer_is_its_border():
    """The last variable of a layer meets two of the next: it is kept, and they lie inside."""
    inner = split_variables(repeat(np.random.default_rng(0), 5, 4, 3))

    assert np.flatnonzero(~inner).tolist() == [3, 7, 11, 15]


def test_a_variable_that_all_layers_share_is_no_ones_inside():
    inner = split_variables(repeat(np.random.default_rng(0), 6, 4, 3, hub=True))

    assert np.flatnonzero(~inner).tolist() == [0, 4, 8, 12, 16, 20]


def elimination_order(borders: Borders, order, tables: int) -> list[int]:
    eliminated = []
    for number, v in enumerate(order, start=tables):
        eliminated.append(v)
        borders.eliminate(v, number)
    return eliminated


def test_along_a_chain_every_second_goes_in_each_round():
    borders = Borders([(v, v + 1) for v in range(8)], [3] * 9, range(9))

    assert elimination_order(borders, borders.in_rounds(), 8) == [0, 8, 2, 4, 6, 1, 7, 3, 5]


def test_a_chain_of_large_borders_is_eaten_from_its_ends():
    borders = Borders([(v, v + 1) for v in range(4)], [300] * 5, range(5))

    assert elimination_order(borders, borders.in_rounds(), 4) == [0, 1, 2, 3, 4]


def test_the_smallest_table_goes_first():
    borders = Borders([(0, 1), (1, 2), (2, 3)], [2, 9, 2, 9], range(4))

    assert elimination_order(borders, borders.cheapest(), 3) == [3, 1, 0, 2]

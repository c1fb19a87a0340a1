"""Bounds of pipelines are below what they bound, with memory and without."""

import math

import numpy as np
import pytest

from shardwright.cluster import find
from shardwright.plan.joint.bounds import LeastCosts, idle_seconds, least_seconds, load_of
from shardwright.plan.joint.search import PipelineSearch

from .models import language
from .test_planner import MIXED, setup


def priced(*lines, bytes=0.0):
    prices, least = np.array(lines).T
    return LeastCosts(prices, least, bytes)


def test_equal_seats_share_the_work():
    assert least_seconds([load_of(4, priced((0.0, 8.0)), math.inf)]) == 2.0


def test_a_faster_seat_takes_more():
    loads = [load_of(1, priced((0.0, 3.0)), math.inf), load_of(1, priced((0.0, 6.0)), math.inf)]

    assert least_seconds(loads) == pytest.approx(2.0)  # two thirds of 3 seconds, and a third of 6


def test_what_memory_costs_is_in_the_bound():
    lines = priced((0.0, 4.0), (0.5, 4.0 + 0.5 * 8.0), bytes=2.0)  # 4 seconds with 8 bytes, and 2 bytes save a second

    assert least_seconds([load_of(1, lines, 8.0)]) == 4.0
    assert least_seconds([load_of(1, lines, 4.0)]) == 6.0
    assert least_seconds([load_of(2, lines, 4.0)]) == 2.0
    assert least_seconds([load_of(1, lines, 1.0)]) == math.inf


def test_where_no_rank_can_run_all_blocks_nothing_bounds_it():
    assert idle_seconds([math.inf, math.inf], 1.0) == math.inf
    assert idle_seconds([2.0, math.inf], 1.0) == 0.0
    assert idle_seconds([2.0, 2.0], 1.0) == 1.0


@pytest.mark.parametrize("room", [math.inf, 0.8 * 2**30, 0.5 * 2**30, 0.35 * 2**30])
def test_bounds_that_know_of_memory_are_below_what_they_bound(room):
    search = PipelineSearch(setup(language(layers=4), find("4xA100-80GB"), training=MIXED, room=room))
    tried, raised = 0, 0
    for rough in search.candidates:
        within = search.within(rough)
        trial = search.tried(search.candidates.sure(rough))
        raised += within.bound > rough.bound
        if trial is not None:
            tried += 1
            assert within.bound <= trial.seconds * (1 + 1e-9)
    assert tried
    assert (raised > 0) == (room < math.inf)


def test_what_is_known_of_larger_microbatches_bounds_smaller_ones():
    search = PipelineSearch(setup(language(layers=4), find("4xA100-80GB"), training=MIXED))
    rough = {
        (candidate.pp_ranks, candidate.microbatches): candidate
        for candidate in search.candidates
        if len(candidate.pp_ranks) == 1
    }
    for (pp_ranks, microbatches), candidate in rough.items():
        if (pp_ranks, 2 * microbatches) in rough:
            search.candidates.sure(candidate)
            after = search.candidates.by_now(rough[pp_ranks, 2 * microbatches])
            assert rough[pp_ranks, 2 * microbatches].bound <= after.bound
            assert after.bound <= search.candidates.sure(after).bound * (1 + 1e-9)

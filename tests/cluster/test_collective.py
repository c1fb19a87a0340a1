import math
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shardwright.cluster import COLLECTIVES, Curve, Link, MeasuredCollective, Span, collective_time, parse
from shardwright.errors import ClusterError
from shardwright.layout import Axis, Mesh

kinds = st.sampled_from(COLLECTIVES)
amounts = st.floats(1, 1e12)
FAST = Link(name="fast", bandwidth=100e9, latency=1e-6)
SLOW = Link(name="slow", bandwidth=10e9, latency=5e-6)


@st.composite
def links(draw, name):
    bandwidth = draw(st.floats(1e6, 1e12))
    pair = draw(st.none() | st.floats(0.1, 1).map(lambda part: part * bandwidth))
    return Link(
        name=name, bandwidth=bandwidth, pair=pair, latency=draw(st.floats(0, 1e-3)), efficiency=draw(st.floats(0.1, 1))
    )


@st.composite
def spans(draw):
    ranks = tuple(sorted(draw(st.lists(st.integers(1, 16), min_size=1, max_size=16)), reverse=True))
    assume(sum(ranks) > 1)
    inside = draw(links("inside")) if ranks[0] > 1 else None
    return Span(ranks=ranks, inside=inside, between=draw(links("between")) if len(ranks) > 1 else None)


@given(kinds, spans(), amounts, st.floats(1, 1000))
def test_more_bytes_take_more_time(kind, span, bytes, more):
    assert 0 < collective_time(kind, bytes, span) <= collective_time(kind, bytes * more, span) * (1 + 1e-9)


@given(kinds, spans(), amounts)
def test_no_collective_beats_its_links(kind, span, bytes):
    """Each rank must at least receive what it does not have, over all the links that it has."""
    missing = {"broadcast": 1.0, "send": 1.0, "all_reduce": 1.0}.get(kind, (span.size - 1) / span.size)
    fastest = max(
        link.bandwidth * (span.ranks[-1] if link is span.between and kind != "send" else 1) for link in span.links
    )
    assert collective_time(kind, bytes, span) >= missing * bytes / fastest * (1 - 1e-9)


@given(spans(), amounts)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(span, bytes):
    both = collective_time("reduce_scatter", bytes, span) + collective_time("all_gather", bytes, span)
    once = collective_time("all_reduce", bytes, span)
    assert once <= both * (1 + 1e-9)  # a tree has fewer hops
    still = replace(
        span,
        inside=span.inside and replace(span.inside, latency=0.0),
        between=span.between and replace(span.between, latency=0.0),
    )
    parts = collective_time("reduce_scatter", bytes, still) + collective_time("all_gather", bytes, still)
    assert collective_time("all_reduce", bytes, still) == pytest.approx(parts)


@given(kinds, st.integers(1, 16), st.integers(2, 16), amounts, links("fast"), st.floats(0.001, 1), st.floats(1, 100))
def test_across_nodes_is_never_faster_than_all_in_one_node(kind, per_node, nodes, bytes, fast, part, longer):
    fast = replace(fast, pair=None)
    slow = replace(fast, name="slow", bandwidth=fast.bandwidth * part, latency=fast.latency * longer)
    single = Span(ranks=(per_node * nodes,), inside=fast)
    several = Span(ranks=(per_node,) * nodes, inside=fast if per_node > 1 else None, between=slow)
    assert collective_time(kind, bytes, several) >= collective_time(kind, bytes, single) * (1 - 1e-9)


@given(kinds, amounts)
def test_a_rank_alone_does_not_communicate(kind, bytes):
    assert collective_time(kind, bytes, Span(ranks=(1,))) == 0


@pytest.mark.parametrize(
    ("kind", "seconds"),
    [
        ("all_gather", 7 / 8 * 1e9 / 100e9 + 7e-6),
        ("reduce_scatter", 7 / 8 * 1e9 / 100e9 + 7e-6),
        ("all_reduce", 2 * 7 / 8 * 1e9 / 100e9 + 6e-6),
        ("all_to_all", 7 / 8 * 1e9 / 100e9 + 7e-6),
        ("broadcast", 1e9 / 100e9 + 3e-6),
        ("send", 1e9 / 100e9 + 1e-6),
    ],
)
def test_in_a_node_it_is_a_ring_or_a_tree(kind, seconds):
    assert collective_time(kind, 1e9, Span(ranks=(8,), inside=FAST)) == pytest.approx(seconds)


def test_a_ring_over_nodes_uses_the_adapters_of_all_its_ranks():
    def turn(per_node):
        inside = FAST if per_node > 1 else None
        return Span(ranks=(per_node,) * 2, inside=inside, between=SLOW).ring

    assert [turn(count) for count in (1, 2, 4, 16)] == [10e9, 20e9, 40e9, 100e9]
    assert Span(ranks=(8, 2), inside=FAST, between=SLOW).ring == 20e9  # the node with the fewest is the bottleneck


def test_a_tree_over_nodes_grows_with_the_logarithm_of_their_number():
    def small(nodes):
        return collective_time("all_reduce", 1e-9, Span(ranks=(8,) * nodes, inside=FAST, between=SLOW))

    assert small(4) - small(2) == pytest.approx(small(64) - small(32)) == pytest.approx(2 * SLOW.latency)


def test_measured_times_take_the_place_of_the_formula():
    cluster = parse("2x8xH100")
    table = MeasuredCollective(kind="all_reduce", ranks=(8,), seconds=Curve(((1e3, 1.0), (1e5, 100.0))))
    cluster = replace(cluster, measured=(table,))
    grid = Mesh(axes=(Axis(name="dp", size=2), Axis(name="tp", size=8)))

    def time(kind, bytes, axis):
        return cluster.collective_time(kind, bytes, grid, [axis])

    assert time("all_reduce", 1e4, "tp") == pytest.approx(10.0)  # between two sizes: straight on log-log paper
    assert time("all_reduce", 1.0, "tp") == 1.0  # below: the latency
    assert time("all_reduce", 1e6, "tp") == pytest.approx(1000.0)  # above: the bandwidth of the last
    assert time("all_gather", 1e4, "tp") < 1e-3  # another kind, another group: the formula
    assert time("all_reduce", 1e4, "dp") < 1e-3


def test_a_known_machine_comes_out_as_it_is_known():
    """nccl-tests on 8 A100 with NVSwitch: a bus bandwidth of about 235 GB/s, and about 20 us for small all_reduces."""
    (span,) = parse("8xA100-80GB").spans(Mesh(axes=(Axis(name="tp", size=8),)), ["tp"])
    large = 2 * 7 / 8 * 2**30 / collective_time("all_reduce", 2**30, span)
    assert 225e9 < large < 245e9
    assert 10e-6 < collective_time("all_reduce", 1024, span) < 35e-6


@pytest.mark.parametrize(
    ("ranks", "inside", "between"),
    [
        ((), None, None),
        ((0,), None, None),
        ((2, 4), FAST, SLOW),
        ((2,), None, None),
        ((1,), FAST, None),
        ((1, 1), None, None),
    ],
)
def test_a_span_that_makes_no_sense_is_refused(ranks, inside, between):
    with pytest.raises(ClusterError, match="a span"):
        Span(ranks=ranks, inside=inside, between=between)


def test_what_is_no_collective_is_refused():
    with pytest.raises(ClusterError, match="'gather' is no collective; there are all_reduce"):
        collective_time("gather", 1, Span(ranks=(8,), inside=FAST))
    with pytest.raises(ClusterError, match="'gather' is no collective"):
        MeasuredCollective(kind="gather", ranks=(2,), seconds=Curve(((1.0, 1.0),)))
    assert math.isfinite(collective_time("send", 1, Span(ranks=(8,), inside=FAST)))

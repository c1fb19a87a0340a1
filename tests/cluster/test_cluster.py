"""Which links the axes of a mesh cross."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardwright.cluster import USUAL_OVERLAP, Cluster, parse
from shardwright.cluster.catalogue import DEVICES, LINKS, network
from shardwright.cluster.cluster import Node, NodeGroup, rank_groups
from shardwright.errors import ClusterError, LayoutError
from shardwright.layout import Axis, Mesh


def mesh(devices=(), **sizes):
    return Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()), devices=tuple(devices))


# (cluster, mesh, axes) -> ranks of a group on each node, and the links it crosses
CROSSED = [
    ("8xH100", mesh(tp=8), "tp", (8,), "nvlink-4"),
    ("8xH100", mesh(dp=2, tp=4), "dp", (2,), "nvlink-4"),
    ("2x8xH100", mesh(dp=2, tp=8), "tp", (8,), "nvlink-4"),
    ("2x8xH100", mesh(dp=2, tp=8), "dp", (1, 1), "8xinfiniband-400"),
    ("2x8xH100", mesh(dp=4, tp=4), "dp", (2, 2), "nvlink-4 8xinfiniband-400"),
    ("2x8xH100", mesh(dp=4, tp=4), "tp", (4,), "nvlink-4"),
    ("2x8xH100", mesh(tp=16), "tp", (8, 8), "nvlink-4 8xinfiniband-400"),
    ("2x8xH100", mesh(dp=2, tp=8), "dp tp", (8, 8), "nvlink-4 8xinfiniband-400"),
    ("4x8xH100", mesh(pp=4, dp=2, tp=4), "pp", (1, 1, 1, 1), "8xinfiniband-400"),
    ("4x8xH100", mesh(pp=4, dp=2, tp=4), "dp", (2,), "nvlink-4"),
    ("4x8xH100", mesh(pp=4, dp=2, tp=4), "pp tp", (4, 4, 4, 4), "nvlink-4 8xinfiniband-400"),
    ("4x8xH100", mesh(pp=2, dp=4, tp=4), "dp", (2, 2), "nvlink-4 8xinfiniband-400"),
    ("4x8xH100", mesh(pp=2, dp=4, tp=4), "pp", (1, 1), "8xinfiniband-400"),
    ("4x8xH100", mesh(tp=8), "tp", (8,), "nvlink-4"),  # a mesh may leave devices out
    ("2x8xH100", mesh(devices=range(8, 16), tp=8), "tp", (8,), "nvlink-4"),
    ("2x8xH100", mesh(devices=range(4, 12), tp=8), "tp", (4, 4), "nvlink-4 8xinfiniband-400"),
    ("2x8xH100", mesh(devices=(*range(6), 8, 9), tp=8), "tp", (6, 2), "nvlink-4 8xinfiniband-400"),
    ("2x8xH100", mesh(dp=1, tp=16), "dp", (1,), ""),
    ("8xMI300X", mesh(tp=8), "tp", (8,), "infinity-fabric-3"),
    ("2x4xcpu", mesh(dp=2, tp=4), "dp", (1, 1), "ethernet-10"),
]


@pytest.mark.parametrize(("name", "grid", "axes", "ranks", "links"), CROSSED)
def test_an_axis_crosses_the_links_between_its_ranks(name, grid, axes, ranks, links):
    (span,) = parse(name).spans(grid, axes.split())
    assert span.ranks == ranks
    assert " ".join(link.name for link in span.links) == links


def test_groups_of_one_axis_may_lie_differently():
    spans = parse("2x3xH100").spans(mesh(dp=3, tp=2), ["tp"])
    assert {span.ranks for span in spans} == {(2,), (1, 1)}


def test_the_slowest_group_counts():
    cluster = parse("2x3xH100")
    apart = cluster.collective_time("all_reduce", 2**20, mesh(dp=3, tp=2), ["tp"])
    assert apart == cluster.collective_time("all_reduce", 2**20, mesh(devices=(2, 3), tp=2), ["tp"])
    assert apart > cluster.collective_time("all_reduce", 2**20, mesh(devices=(0, 1), tp=2), ["tp"])


def test_different_nodes_talk_as_fast_as_the_slower():
    cluster = parse("8xH100+8xA100-80GB")
    (span,) = cluster.spans(mesh(dp=2, tp=8), ["dp"])
    assert span.between.name == "8xinfiniband-200"
    spans = cluster.spans(mesh(dp=2, tp=8), ["tp"])
    assert {span.inside.name for span in spans} == {"nvlink-4", "nvlink-3"}


def test_what_joins_the_groups_counts_only_from_group_to_group():
    node = Node(device=DEVICES["H100"], devices=2, inside=LINKS["nvlink-4"], network=network("2xinfiniband-400", 2))
    slow = network("ethernet-10", 2)
    cluster = Cluster(name="c", groups=(NodeGroup(node=node, nodes=2), NodeGroup(node=node, nodes=2)), between=slow)
    assert cluster.span([0, 2]).between == node.network
    assert cluster.span([0, 4]).between == slow
    assert cluster.span([4, 6]).between == node.network


def test_a_cluster_says_what_it_has():
    cluster = parse("2x8xH100+4xV100-16GB")
    assert (cluster.size, cluster.nodes) == (20, 3)
    assert cluster.memory == DEVICES["V100-16GB"].memory
    assert [device.name for device in cluster.devices] == ["H100", "V100-16GB"]
    assert [cluster.node_of(rank) for rank in (0, 7, 8, 15, 16, 19)] == [(0, 0), (0, 0), (0, 1), (0, 1), (1, 0), (1, 0)]


@pytest.mark.parametrize("rank", [-1, 8])
def test_a_rank_that_is_not_there_is_refused(rank):
    with pytest.raises(ClusterError, match=r"no rank -?\d in '8xH100', which has 8 devices"):
        parse("8xH100").device(rank)


def test_a_mesh_larger_than_the_cluster_is_refused():
    with pytest.raises(ClusterError, match="no rank 8"):
        parse("8xH100").spans(mesh(tp=16), ["tp"])


def test_an_axis_that_is_not_there_is_refused():
    with pytest.raises(LayoutError, match="no axis 'sp'"):
        parse("8xH100").spans(mesh(tp=8), ["sp"])


@given(st.data())
def test_rank_groups_are_those_of_the_mesh(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    axes = tuple(Axis(name=f"a{place}", size=size) for place, size in enumerate(sizes))
    grid = Mesh(axes=axes)
    grid = Mesh(axes=axes, devices=tuple(data.draw(st.permutations(grid.devices))))
    chosen = data.draw(st.sets(st.sampled_from(grid.names)))
    ours = {frozenset(ranks) for ranks in rank_groups(grid, chosen)}
    assert ours == {frozenset(ranks) for ranks in grid.groups(chosen)}


# -- what a collective takes from the kernels beside it


def test_kernels_keep_the_processors_that_a_collective_does_not_take():
    assert parse("8xH100").overlap == pytest.approx(1 - 24 / 132)
    assert parse("8xH100+8xA100-80GB").overlap == parse("8xA100-80GB").overlap == pytest.approx(1 - 24 / 108)
    assert parse("cpu:4").overlap == USUAL_OVERLAP


def test_a_fast_link_takes_more_of_the_memory_than_a_slow_one():
    fast, slow = parse("2x8xH100"), parse("2x8xH100@ethernet-100")
    everyone = mesh(dp=16)
    shares = [cluster.memory_share(*cluster.spans(everyone, ["dp"]), cluster.device(0)) for cluster in (fast, slow)]
    assert 0.25 < shares[0] < 0.35
    assert 0 < shares[1] < 0.02


def test_overlap_that_was_measured_has_the_memory_in_it():
    cluster = replace(parse("8xH100"), overlap=0.5)
    (span,) = cluster.spans(mesh(dp=8), ["dp"])
    assert cluster.memory_share(span, cluster.device(0)) == 0.0
    assert parse("cpu:4").memory_share(parse("cpu:4").span(range(4)), DEVICES["cpu"]) == 0.0

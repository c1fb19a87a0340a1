"""Measuring: what is measured where, and once in earnest on two processes."""

import os
from dataclasses import replace

import pytest
import torch
import yaml

from shardwright.calibrate import QUICK, Effort, calibrate
from shardwright.calibrate.collectives import count_per_node, fit, meshes
from shardwright.calibrate.compute import (
    FRESH,
    Series,
    _sizes,
    as_device,
    is_crowded,
    measure_attention,
    measure_ops,
    slowest,
    slowest_attention,
)
from shardwright.calibrate.timing import seconds
from shardwright.cli import main
from shardwright.cluster import COLLECTIVES, KINDS, AttentionPrice, Curve, MeasuredCollective, load
from shardwright.errors import ClusterError
from shardwright.layout import Axis, Mesh

TINY = Effort(each=0.001, longest=0.002, largest=2**16, factor=16, dtypes=(torch.float32,))


def test_groups_in_a_node_and_across_nodes_are_measured():
    measured = {ranks: str(mesh) for ranks, mesh in meshes(8, 4)}
    assert measured == {
        (2,): "rest=4 x group=2",
        (4,): "rest=2 x group=4",
        (4, 4): "rest=1 x group=8",
        (1, 1): "rest=1 x group=2 x place=4",
    }
    assert [ranks for ranks, _ in meshes(4, 1)] == [(1, 1), (1, 1, 1, 1)]
    assert [ranks for ranks, _ in meshes(6, 6)] == [(2,), (3,), (6,)]
    assert list(meshes(1, 1)) == []


def test_nodes_are_distinguished_by_their_hosts():
    assert count_per_node(["a", "a", "b", "b"]) == 2
    assert count_per_node(["a"]) == 1
    for hosts in (["a", "b", "a", "b"], ["a", "a", "b"]):
        with pytest.raises(ClusterError, match="equally many ranks"):
            count_per_node(hosts)


def test_the_slowest_rank_counts_at_sizes_that_all_have():
    fast = Series(kind="copy", dtype="float32", points=((1.0, 1.0), (2.0, 5.0), (4.0, 6.0)))
    slow = Series(kind="copy", dtype="float32", points=((1.0, 2.0), (2.0, 3.0)))
    (both,) = slowest([(fast,), (slow,)])
    assert both.points == ((1.0, 2.0), (2.0, 5.0))


def test_ranks_that_share_cores_are_as_slow_as_usual_and_not_as_quick_as_ever():
    cpu, cores = torch.device("cpu"), os.cpu_count() or 1
    assert is_crowded(cpu, cores * torch.get_num_threads() + 1)
    assert not is_crowded(cpu, 1) or torch.get_num_threads() > cores
    assert not is_crowded(torch.device("cuda"), 1000)

    def estimate(crowded: bool) -> float:
        times = iter([1e-4, *range(1, 11)])
        return seconds(lambda: None, cpu, TINY, lambda _: next(times), crowded=crowded)

    assert (estimate(False), estimate(True)) == (1, 5.5)


def test_a_measured_device_repeats_what_was_measured():
    measured = measure_ops(torch.device("cpu"), TINY, lambda what: None)
    device = as_device(torch.device("cpu"), measured, sharing=2)
    assert {item.kind for item in device.efficiency} == set(KINDS)
    for series in measured:
        for size, time in series.points:
            again = (
                size / (device.peak(series.dtype) * device.fraction(series.kind, size, series.dtype))
                if series.kind in ("matmul", "attention", "convolution")
                else device.op_time(0, size, series.kind, series.dtype)
            )
            assert again == pytest.approx(time, rel=1e-2)
    assert max(value for item in device.efficiency if item.kind == "matmul" for _, value in item.curve.points) <= 1.001


def test_products_and_functions_are_measured_as_they_train():
    """Forward and backward, a pass of which takes a third and a half of the call."""
    calls = {kind: next(_sizes(kind, torch.float32, torch.device("cpu"), TINY)) for kind in KINDS}
    assert {kind: call.passes for kind, call in calls.items() if call.passes > 1} == {
        "matmul": 3, "convolution": 3, "function": 2
    }  # fmt: skip
    for kind in ("matmul", "convolution"):
        assert len(calls[kind].run()) == 2  # the gradients of both operands


def test_pointwise_ops_are_measured_beyond_the_other_sizes():
    largest = {
        kind: max(call.size for call in _sizes(kind, torch.float32, torch.device("cpu"), TINY))
        for kind in ("pointwise", "copy")
    }
    assert largest["pointwise"] / 3 >= FRESH * largest["copy"] / 2


def test_attention_is_measured_with_masks_and_backward():
    price = measure_attention(torch.device("cpu"), TINY)
    assert price.causal != AttentionPrice().causal and price.backward != AttentionPrice().backward
    assert price.masked > 0
    slow = AttentionPrice(causal=0.1, backward=0.2, masked=9.0)
    assert slowest_attention([price, slow]) == slow


def test_a_link_is_fitted_to_the_smallest_ring():
    def table(ranks, *points):
        return MeasuredCollective(kind="all_gather", ranks=ranks, seconds=Curve(points))

    tables = (
        table((4,), (1e3, 9e-4), (1e9, 9.0)),
        table((2,), (1e3, 1e-4), (1e9, 1.0 + 1e-4)),
        table((1, 1), (1e3, 5e-4), (1e9, 10.0)),
    )
    inside, network = fit("inside", tables, across=False), fit("network", tables, across=True)
    assert (inside.bandwidth, inside.latency) == (pytest.approx(0.5e9), 1e-4)
    assert network.bandwidth == pytest.approx(0.05e9, rel=1e-2)
    assert fit("network", tables[:2], across=True) is None


def test_one_process_measures_ops_alone():
    cluster, world = calibrate(TINY, ranks=1)
    assert (cluster.size, cluster.measured, world.rank) == (1, (), 0)


def test_calibrate_in_earnest(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("shardwright.cli.calibrate.QUICK", replace(QUICK, each=0.01, longest=0.02, largest=2**20))
    path = tmp_path / "out" / "mine.yaml"
    assert main(["calibrate", "--quick", "--ranks", "2", "-o", str(path)]) == 0

    output = capsys.readouterr().out
    assert "matmul" in output and "all_reduce" in output and "mine.yaml" in output
    assert yaml.safe_load(path.read_text())["version"] == 1
    cluster = load(path)
    assert (cluster.name, cluster.size, cluster.nodes) == ("mine", 2, 1)
    assert {table.kind for table in cluster.measured} == set(COLLECTIVES)
    device = cluster.device(0)
    assert device.name == "cpu"
    assert device.matmul_time(512, 512, 512, "float32") < device.matmul_time(2048, 2048, 2048, "float32")
    grid = Mesh(axes=(Axis(name="dp", size=2),))
    small, large = (cluster.collective_time("all_reduce", size, grid, ["dp"]) for size in (2**10, 2**26))
    assert 1e-6 < small < large < 100


def test_no_ranks_are_refused(capsys):
    assert main(["calibrate", "--ranks", "0"]) == 2
    assert "--ranks 0" in capsys.readouterr().err

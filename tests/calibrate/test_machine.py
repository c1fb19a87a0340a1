"""What `auto` measures on a machine: once, by all ranks, kept in a file that is trusted only if it is right."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

import shardwright as sw
from shardwright.calibrate import Effort, measured_cluster
from shardwright.calibrate.machine import RankPlace, cache_path, describe, per_node, rank_place
from shardwright.cluster import dump, parse
from shardwright.errors import DriftError
from shardwright.planning import cluster_here
from shardwright.runtime.launch import run_processes
from shardwright.runtime.world import World, here
from shardwright.verify.ranks import run_threads

TINY = Effort(each=0.001, longest=0.002, largest=2**14, factor=16, dtypes=(torch.float32,))


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDWRIGHT_CACHE", str(tmp_path))
    monkeypatch.setenv("SHARDWRIGHT_CALIBRATE", "1")
    return tmp_path


def _measure(rank: int, folder: str) -> tuple[list[str], str]:
    """Measure, read it, damage it, read it again, and then ask for different clusters."""
    os.environ |= {"SHARDWRIGHT_CACHE": folder, "SHARDWRIGHT_CALIBRATE": "1"}
    clusters = [measured_cluster(here(), TINY), measured_cluster(here(), TINY)]
    path = cache_path(clusters[0].about)
    if rank == 0:
        path.write_text(path.read_text().replace("version: 1", "version: 7"))
    clusters.append(measured_cluster(here(), TINY))
    cluster = "auto" if rank == 0 else "cpu:2"
    with pytest.raises(DriftError) as raised:
        sw.parallelize(nn.Linear(4, 4), plan="auto", cluster=cluster, compile={"directory": f"{folder}/code"})
    return [dump(cluster) for cluster in clusters], str(raised.value)


def test_ranks_measure_once_and_agree(cache):
    (first, message), (second, _) = run_processes(2, _measure, str(cache), timeout=300)

    measured, read, again = first
    assert first == second
    assert read == measured
    assert again != measured  # the damaged file was not trusted
    (path,) = cache.rglob("*.yaml")
    assert path.read_text() == again
    assert "all_reduce" in measured and '"torch"' in measured
    assert "the ranks have different" in message  # where one of them measures and the other does not


def test_threads_are_not_measured(cache):
    assert run_threads(2, lambda rank: measured_cluster(here(), TINY)) == [None, None]


def test_auto_plans_for_what_was_measured(cache):
    described = describe([rank_place(here())])
    cluster = measured_cluster(here(), TINY)
    assert cluster.about == described

    def planned_for(**options):
        compile = {"directory": cache / "code"}
        model = sw.parallelize(nn.Linear(4, 4), example=torch.ones(2, 4), compile=compile, **options)
        return model.plan.made_for

    assert planned_for() == cluster
    assert planned_for(cluster="catalogue") == parse("cpu")
    assert planned_for(cluster="cpu:1") == parse("cpu:1")


def test_a_file_that_others_can_change_is_measured_again(cache):
    cluster = measured_cluster(here(), TINY)
    path = cache_path(cluster.about)
    planted = dump(cluster).replace("name: measured", "name: planted")
    path.write_text(planted)
    assert measured_cluster(here(), TINY).name == "planted"  # it is this user's

    path.chmod(0o666)
    assert measured_cluster(here(), TINY).name == "measured"

    elsewhere = cache / "elsewhere.yaml"
    elsewhere.write_text(planted)
    path.unlink()
    path.symlink_to(elsewhere)
    assert measured_cluster(here(), TINY).name == "measured"
    assert elsewhere.read_text() == planted and not path.is_symlink()


def test_a_measurement_of_another_machine_is_not_read(cache):
    cluster = measured_cluster(here(), TINY)
    path = cache_path(cluster.about)
    path.write_text(dump(cluster).replace('"cores"', '"other cores"').replace("name: measured", "name: planted"))
    assert measured_cluster(here(), TINY).name == "measured"


def test_a_folder_that_can_not_be_written_is_told(cache, caplog):
    (cache / "clusters").write_text("in the way")
    assert measured_cluster(here(), TINY).name == "measured"
    assert "SHARDWRIGHT_CACHE" in caplog.text


def place(node: str, **others) -> RankPlace:
    return RankPlace(**{"node": node, "processor": "p", "cores": 2, "memory": 4, "threads": 1, **others})


def test_nodes_need_equally_many_ranks_in_a_row():
    assert per_node([place("a"), place("a"), place("b"), place("b")]) == 2
    assert per_node([place("a"), place("b"), place("a"), place("b")]) is None
    assert per_node([place("a"), place("a"), place("b")]) is None


def test_a_measurement_is_of_a_placement_and_not_of_names():
    together, apart = [place("a"), place("a")], [place("a"), place("b")]
    assert describe(together) == describe([place("x"), place("x")]) != describe(apart)
    assert describe(together) != describe([place("a", threads=2), place("a", threads=2)])
    assert describe(apart) != describe([place("a"), place("b", cores=4)])
    assert "/" not in Path(cache_path(describe(apart))).stem


def test_cpus_of_several_nodes_are_several_nodes(monkeypatch):
    world = World(rank=0, size=4, device=torch.device("cpu"))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert (cluster_here(world).nodes, cluster_here(world).size) == (1, 4)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert (cluster_here(world).nodes, cluster_here(world).size) == (2, 4)

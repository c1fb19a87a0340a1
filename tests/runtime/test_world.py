"""Ranks and groups: who communicates with whom, in which order, made once."""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardwright.errors import LayoutError, RankError
from shardwright.layout import Axis, Mesh
from shardwright.runtime import world
from shardwright.runtime.world import Groups
from tests.launched import launch
from tests.runtime.ranks import run_processes, run_ranks


def mesh(devices: tuple[int, ...] = (), **sizes: int) -> Mesh:
    return Mesh(axes=tuple(Axis(name=name, size=size) for name, size in sizes.items()), devices=devices)


def test_a_world_of_one_needs_nothing() -> None:
    here = world.start()

    assert (here.rank, here.size) == (0, 1)
    group = Groups(mesh(dp=1, tp=1))["dp"]
    assert (group.size, group.index, group.ranks, group.process_group) == (1, 0, (0,), None)


def test_a_mesh_larger_than_the_world_is_refused() -> None:
    with pytest.raises(RankError, match="torchrun --nproc-per-node 4"):
        Groups(mesh(dp=2, tp=2))


def test_a_group_of_ranks_that_have_not_met_is_refused() -> None:
    with pytest.raises(RankError, match=r"not initialised; call shardwright\.runtime\.world\.start\(\) first"):
        world.group_of((0, 1))


def test_importing_starts_nothing() -> None:
    code = (
        "import shardwright, shardwright.runtime.collectives.comm, torch.distributed as d, sys, threading;"
        "sys.exit(d.is_initialized() or threading.active_count() > 1)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def gathered(group: world.Group) -> list[int]:
    if group.process_group is None:
        return [dist.get_rank()]
    out = torch.empty(group.size, dtype=torch.long)
    dist.all_gather_single(out, torch.tensor([dist.get_rank()]), group=group.process_group)
    return out.tolist()


def all_groups(rank: int, devices: tuple[int, ...]) -> dict[tuple[str, ...], list[int]]:
    groups = Groups(mesh(devices, dp=2, tp=2, one=1), [("tp", "dp"), ("dp", "tp"), ("dp",)])
    by_name = {}
    for axes in [("dp",), ("tp",), ("one",), ("dp", "tp"), ("tp", "dp")]:
        group = groups[axes]
        by_name[axes] = gathered(group)
        assert by_name[axes] == list(group.ranks)
        assert group.ranks[group.index] == rank
        assert group.axes == axes
    assert groups["dp"] is groups["dp",]
    return by_name


@pytest.mark.parametrize("run", [run_ranks, run_processes])
def test_groups_hold_the_ranks_of_the_mesh_in_the_order_of_the_axes(run) -> None:
    results = run(4, all_groups, ())

    assert results[1] == {
        ("dp",): [1, 3],
        ("tp",): [0, 1],
        ("one",): [1],
        ("dp", "tp"): [0, 1, 2, 3],
        ("tp", "dp"): [0, 2, 1, 3],
    }


def test_devices_in_another_order() -> None:
    results = run_ranks(4, all_groups, (3, 1, 2, 0))

    assert results[3][("tp",)] == [3, 1]
    assert results[0][("dp", "tp")] == [3, 1, 2, 0]


def twice(rank: int) -> tuple[int, int]:
    wanted = [("dp", "tp"), ("tp", "dp")]
    Groups(mesh(dp=2, tp=2), wanted)
    before = len(dist.distributed_c10d._world.pg_map)
    Groups(mesh(dp=2, tp=2), wanted)
    Groups(mesh(pp=2, fsdp=2))
    return before, len(dist.distributed_c10d._world.pg_map)


def test_making_groups_again_makes_no_new_ones() -> None:
    assert all(before == after for before, after in run_ranks(4, twice))


def two_stages(rank: int) -> list[int]:
    stages = [Groups(mesh((0, 1), tp=2)), Groups(mesh((2, 3), tp=2))]
    with pytest.raises(LayoutError, match="no group over tp"):
        stages[1 - rank // 2]["tp"]
    return gathered(stages[rank // 2]["tp"])


def test_a_rank_takes_part_in_making_groups_it_is_not_in() -> None:
    assert run_ranks(4, two_stages) == [[0, 1], [0, 1], [2, 3], [2, 3]]


def as_device_mesh(rank: int) -> tuple[tuple[str, ...], list[int], int]:
    actual = Groups(mesh(dp=2, one=1, tp=2)).device_mesh()
    assert actual is not None
    return actual.mesh_dim_names, list(actual.get_coordinate() or ()), actual.get_group("tp").size()


def test_the_groups_are_also_a_device_mesh() -> None:
    assert run_ranks(4, as_device_mesh)[2] == (("dp", "tp"), [1, 0], 2)


def test_many_fake_ranks() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=5, world_size=512)
    try:
        groups = Groups(mesh(pp=4, dp=16, tp=8), [("dp", "tp")])
        assert groups["tp"].index == 5
        assert groups["dp", "tp"].size == 128
    finally:
        dist.destroy_process_group()


def subgroup_timeout(rank: int) -> timedelta:
    group = Groups(mesh(dp=2, tp=2))["dp"].process_group
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout


def test_a_subgroup_waits_as_long_as_its_parent() -> None:
    assert run_processes(4, subgroup_timeout, timeout=41)[0] == timedelta(seconds=41)


def joins_twice() -> None:
    assert not dist.is_initialized()
    here = world.start(timeout=30)
    again = world.start()
    assert here == again
    assert (here.size, here.device) == (2, torch.device("cpu"))
    x = torch.tensor(here.rank)
    dist.all_reduce(x)
    assert x.item() == 1
    dist.destroy_process_group()


def test_start_joins_the_ranks_of_torchrun(tmp_path) -> None:
    for rank in launch(2, joins_twice, folder=tmp_path):
        assert rank.code == 0, rank.text

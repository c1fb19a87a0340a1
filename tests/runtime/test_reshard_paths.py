"""Whole paths of reshards with the runtime's collectives, on threads: several axes at once, in either order.

`tests/test_reshard.py` simulates random paths; here some that need groups over several axes run for real.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from shardwright.cost.reshard_prices import BytePrices
from shardwright.cost.reshard_search import find_reshards
from shardwright.layout import (
    INVARIANT,
    PARTIAL,
    REPLICATE,
    Axis,
    Block,
    Layout,
    contiguous_shard,
    make_layout,
    make_shard,
)
from shardwright.reshard import Reshard
from shardwright.runtime.collectives import comm
from shardwright.runtime.world import Groups
from tests.layout.drawn import mesh_of
from tests.layout.simulated import Shards, assert_lies, spread
from tests.runtime.ranks import run_ranks

MESH = mesh_of(dp=2, tp=3)
DP, TP = MESH.axes
SHAPE = (12, 6)


def copies(placement: object) -> Layout:
    return make_layout([[], []], {"dp": placement, "tp": placement})


def rows(*axes: Axis) -> Layout:
    """The first dim sharded by axes, the first of them slowest."""
    size, shards = SHAPE[0], []
    for axis in axes:
        shards.append(contiguous_shard(axis, size))
        size //= axis.size
    return make_layout([shards, []])


HEADS = make_shard(TP, [Block(1, 6, 2)])
WIDTH = make_shard(DP, [Block(2, 2, 1)])

PATHS: dict[str, tuple[Layout, Layout, list[tuple[str, tuple[str, ...]]]]] = {
    "a sum over both": (copies(PARTIAL), copies(INVARIANT), [("all_reduce", ("dp", "tp"))]),
    "a sum over both, both ways": (copies(PARTIAL), copies(REPLICATE), [("all_reduce_to_r", ("dp", "tp"))]),
    "a sum of gradients": (copies(INVARIANT), copies(REPLICATE), [("replicate", ("dp", "tp"))]),
    "gathered": (rows(DP, TP), copies(INVARIANT), [("all_gather", ("dp", "tp"))]),
    "gathered, the inner axis slowest": (rows(TP, DP), copies(REPLICATE), [("all_gather_to_r", ("tp", "dp"))]),
    "scattered": (copies(PARTIAL), rows(DP, TP), [("reduce_scatter", ("dp", "tp"))]),
    "scattered, the inner axis slowest": (copies(PARTIAL), rows(TP, DP), [("reduce_scatter", ("tp", "dp"))]),
    "a share": (copies(INVARIANT), rows(TP, DP), [("shard", ("tp", "dp"))]),
    "a share, gradients padded": (copies(REPLICATE), rows(TP, DP), [("shard_from_r", ("tp", "dp"))]),
    "padded": (rows(TP, DP), copies(PARTIAL), [("zero_pad", ("tp", "dp"))]),
    "axes that change places": (
        rows(DP, TP), rows(TP, DP), [("all_gather", ("dp", "tp")), ("shard", ("tp", "dp"))],
    ),
    "a major shard that comes last": (
        make_layout([[make_shard(DP, [Block(6, 2, 1)])], [contiguous_shard(TP, 6)]]),
        make_layout([[HEADS, WIDTH], []]), [("all_to_all", ("tp",))],
    ),
    "a major shard that leaves first": (
        make_layout([[HEADS, WIDTH], []]),
        make_layout([[make_shard(DP, [Block(6, 2, 1)])], [contiguous_shard(TP, 6)]]), [("all_to_all", ("tp",))],
    ),
}  # fmt: skip


def run_step(step: Reshard, x: torch.Tensor, groups: Groups) -> torch.Tensor:
    """A step as generated code calls it."""
    name, _, state = step.kind.replace("_to_r", " dst").replace("_from_r", " src").partition(" ")
    function = partial(getattr(comm, name), **({state: comm.R} if state else {}))
    group = groups[step.axes if len(step.axes) > 1 else step.axes[0]]
    if name == "all_to_all":
        return function(x, step.dim, step.to_dim, group, step.sharding, step.to_sharding)
    return function(x, group) if step.dim is None else function(x, step.dim, group, step.sharding)


def travel(rank: int, steps: tuple[Reshard, ...], values: Shards, gradients: Shards) -> tuple[np.ndarray, np.ndarray]:
    groups = Groups(MESH, [step.axes for step in steps])
    start = torch.tensor(values[rank], dtype=torch.float64, requires_grad=True)
    x = start
    for step in steps:
        x = run_step(step, x, groups)
    x.backward(torch.tensor(gradients[rank], dtype=torch.float64))
    assert start.grad is not None
    return x.detach().numpy(), start.grad.numpy()


@pytest.mark.parametrize("name", PATHS)
def test_a_path_brings_a_value_to_its_goal_and_the_gradient_back(name: str) -> None:
    start, goal, expected = PATHS[name]
    steps = find_reshards(start, goal, SHAPE, 8, BytePrices(MESH.sizes), True).steps
    random = np.random.default_rng(0)
    value, gradient = (random.integers(-99, 99, SHAPE) for _ in range(2))
    values, gradients = spread(value, start, MESH, random), spread(gradient, goal.gradient(), MESH, random)

    arrived = run_ranks(MESH.size, travel, steps, values, gradients)

    assert [(step.kind, step.axes) for step in steps] == expected
    assert_lies({rank: there for rank, (there, _) in enumerate(arrived)}, value, goal, MESH)
    assert_lies({rank: back for rank, (_, back) in enumerate(arrived)}, gradient, start.gradient(), MESH)

"""All ranks of a mesh in one process, and what each reshard does to what they hold.

This is the table of conversion.py said with numpy: forward on values, backward on gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from shardwright.layout import Layout, Mesh, Partial, Shard
from shardwright.reshard import Reshard
from tests.layout.drawn import kept_indices, shard

Shards = dict[int, np.ndarray]
"""For each device what it holds."""


def spread(array: np.ndarray, layout: Layout, mesh: Mesh, random: np.random.Generator) -> Shards:
    """An array in a layout: shards where it is cut, random terms that sum to it where it is partial."""
    axes = [name for name, placement in layout.rest if isinstance(placement, Partial)]
    terms: dict[tuple[int, ...], np.ndarray] = {}
    places = {tuple(mesh.coordinates(device)[name] for name in axes) for device in mesh.devices}
    for place in sorted(places)[1:]:
        terms[place] = random.integers(-9, 9, array.shape)
    terms[min(places)] = array - sum(terms.values(), np.zeros_like(array))
    by_name = {}
    for device in mesh.devices:
        at = mesh.coordinates(device)
        by_name[device] = shard(terms[tuple(at[name] for name in axes)], layout, mesh.sizes, at)
    return by_name


def assert_lies(shards: Shards, array: np.ndarray, layout: Layout, mesh: Mesh) -> None:
    """What the devices hold is the array in the layout."""
    partial = [name for name, placement in layout.rest if isinstance(placement, Partial)]
    same = [name for name in mesh.names if layout.shard_of(name) is None and name not in partial]
    for group in mesh.groups(same):
        for device in group[1:]:
            assert np.array_equal(shards[group[0]], shards[device]), f"not the same over {same} in {layout}"
    for group in mesh.groups(partial):
        at = mesh.coordinates(group[0])
        total = sum(shards[device] for device in group)
        assert np.array_equal(total, shard(array, layout, mesh.sizes, at)), f"another value in {layout}"


def forward(steps: Sequence[Reshard], shards: Shards, mesh: Mesh) -> Shards:
    for step in steps:
        shards = _each(shards, mesh, step, FORWARD[step.kind])
    return shards


def backward(steps: Sequence[Reshard], shards: Shards, mesh: Mesh) -> Shards:
    for step in reversed(steps):
        shards = _each(shards, mesh, step, BACKWARD[step.kind])
    return shards


Move = Callable[[list[np.ndarray], Reshard], list[np.ndarray]]


def _each(shards: Shards, mesh: Mesh, step: Reshard, move: Move) -> Shards:
    after: Shards = {}
    for ranks in mesh.groups(step.axes):
        group = sorted(ranks, key=lambda device: [mesh.coordinates(device)[axis] for axis in step.axes])
        after.update(zip(group, move([shards[device] for device in group], step), strict=True))
    return after


def _nothing(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return arrays


def _sum(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return [sum(arrays)] * len(arrays)


def _first(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return [arrays[0], *(np.zeros_like(array) for array in arrays[1:])]


def _join(arrays: list[np.ndarray], dim: int | None, cut: Shard | None) -> np.ndarray:
    assert dim is not None
    assert cut is not None
    shape = list(arrays[0].shape)
    shape[dim] = cut.elements
    whole = np.zeros(shape, dtype=arrays[0].dtype)
    view = np.moveaxis(whole, dim, 0)
    for index, array in enumerate(arrays):
        view[kept_indices(cut, len(arrays), index)] = np.moveaxis(array, dim, 0)
    return whole


def _gather(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return [_join(arrays, step.dim, step.sharding)] * len(arrays)


def _cut(arrays: list[np.ndarray], dim: int | None, cut: Shard | None) -> list[np.ndarray]:
    assert cut is not None
    return [np.take(array, kept_indices(cut, len(arrays), index), axis=dim) for index, array in enumerate(arrays)]


def _take(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return _cut(arrays, step.dim, step.sharding)


def _sum_take(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return _take(_sum(arrays, step), step)


def _pad(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    zeros = [np.zeros_like(array) for array in arrays]
    return [_join([*zeros[:at], array, *zeros[at + 1 :]], step.dim, step.sharding) for at, array in enumerate(arrays)]


def _exchange(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return _cut(_gather(arrays, step), step.to_dim, step.to_sharding)


def _exchange_back(arrays: list[np.ndarray], step: Reshard) -> list[np.ndarray]:
    return _cut([_join(arrays, step.to_dim, step.to_sharding)] * len(arrays), step.dim, step.sharding)


FORWARD: dict[str, Move] = {
    "all_reduce": _sum, "replicate": _nothing, "all_reduce_to_r": _sum, "all_gather": _gather,
    "all_gather_to_r": _gather, "shard": _take, "shard_from_r": _take, "reduce_scatter": _sum_take,
    "zero_pad": _pad, "all_to_all": _exchange, "partial": _first, "invariant": _nothing,
}  # fmt: skip
BACKWARD: dict[str, Move] = {
    "all_reduce": _nothing, "replicate": _sum, "all_reduce_to_r": _sum, "all_gather": _take,
    "all_gather_to_r": _sum_take, "shard": _gather, "shard_from_r": _pad, "reduce_scatter": _gather,
    "zero_pad": _take, "all_to_all": _exchange_back, "partial": _nothing, "invariant": _first,
}  # fmt: skip

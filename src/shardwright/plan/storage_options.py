"""Parameter storage: how parameters are sharded for compute, and what of them ZeRO shards for storage.

For each layout that a use asks for, and each set of axes over which the gradient is summed:

    level    gradient sync in backward            before forward   after the update   sharded
    0        all_reduce                           -                -                  nothing
    1        all_reduce                           -                all_gather         optimizer state
    2        reduce_scatter                       -                all_gather         and gradient
    3        all_gather, reduce_scatter           all_gather       -                  and parameter

Collectives of parameters go in buckets (or, at level 3, units), so each pays its part of the bucket's latency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..cluster import Collective
from ..cost import local_elements
from ..cost.resources import COUNT, Resource
from ..cost.time import update_time
from ..ir import Parameter
from ..ir.graph import ITEM_SIZE
from ..layout import INVARIANT, REPLICATE, Layout
from .spaces import ChoiceSpaces

Storage = tuple[tuple[str, int], ...]
"""(axis, level) for each axis on which something of a parameter is split for storage."""

BUCKET = 25 * 2**20
"""Bytes that the runtime sums at once."""

KERNELS = 8
"""Of an optimizer's step on one parameter."""


class ParameterCollective(NamedTuple):
    """A collective of a parameter, its part of the bucket that it goes in, and the copy into that bucket."""

    resource: Resource
    collective: Collective
    axes: tuple[str, ...]
    seconds: float


@dataclass(frozen=True, eq=False)
class StorageOptions:
    """The states of one kind of parameter."""

    layouts: tuple[Layout, ...]
    storage: tuple[Storage, ...]
    used: np.ndarray  # [state, resource]
    alone: bool  # one op uses it


class StoragePricing:
    """Lists and prices the storage options of parameters."""

    def __init__(
        self,
        spaces: ChoiceSpaces,
        fixed: Mapping[str, Storage] | None = None,
        most: Mapping[str, int] | None = None,
    ) -> None:
        """`fixed`: the storage of every parameter, if it is known. `most`: the highest level for some keys."""
        self.spaces, self.moves, self.training = spaces, spaces.moves, spaces.training
        self.graph, self.mesh = spaces.analysis.graph, spaces.mesh
        self.fixed, self.most = fixed, most or {}
        self._counts: dict[tuple[tuple[int, ...], Layout], float] = {}

    def storage_options(self, parameter: Parameter, uses: Sequence[tuple[Layout, ...]], unit: float) -> StorageOptions:
        """`uses` are the layouts that each use may ask for, `unit` the elements that are gathered together."""
        layouts: list[Layout] = []
        storage: list[Storage] = []
        used: list[np.ndarray] = []
        for layout in self._layouts(uses):
            for stored in self._storages(parameter, layout):
                layouts.append(layout)
                storage.append(stored)
                used.append(self._used(parameter, layout, stored, unit))
        return StorageOptions(layouts=tuple(layouts), storage=tuple(storage), used=np.array(used).reshape(-1, COUNT),
                     alone=len(uses) == 1)  # fmt: skip

    def _layouts(self, uses: Sequence[tuple[Layout, ...]]) -> Iterator[Layout]:
        """Every layout that a use asks for; where several share a parameter, a pending sum of one is one for all."""
        every = dict.fromkeys(layout for use in uses for layout in use)
        if len(uses) > 1:
            for layout in list(every):
                for count in range(1, len(self.mesh.names) + 1):
                    for axes in combinations(self.mesh.names, count):
                        if all(layout.placement(axis) == INVARIANT for axis in axes):
                            for axis in axes:
                                every.setdefault(layout.with_placement(axis, REPLICATE))
        yield from every

    def _storages(self, parameter: Parameter, layout: Layout) -> Iterator[Storage]:
        free = [axis for axis in self.mesh.names if self._may_store(parameter, layout, axis)]
        if self.fixed is not None:
            yield tuple(entry for entry in self.fixed.get(parameter.key, ()) if entry[0] in free)
            return
        yield ()
        highest = self.most.get(parameter.key, 3)
        for level in (1, 2, 3) if parameter.trainable else (3,):
            if level <= highest:
                for count in range(1, len(free) + 1):
                    for axes in combinations(free, count):
                        yield tuple((axis, level) for axis in axes)

    def _may_store(self, parameter: Parameter, layout: Layout, axis: str) -> bool:
        placement = layout.placement(axis)
        return placement == REPLICATE if parameter.trainable else placement is not None

    def _used(self, parameter: Parameter, layout: Layout, storage: Storage, unit: float) -> np.ndarray:
        value, training = self.graph.values[parameter.value], self.training
        used = np.zeros(COUNT)
        count, stored = self.count(value.shape, layout), ITEM_SIZE.get(value.dtype, 4)
        share = self.shares(count, storage)
        used[Resource.STORED] = share[3] * stored
        if zero_level(storage) < 3 and training.item(value) != stored:
            used[Resource.KEPT] = count * training.item(value)  # the cast that autocast keeps for backward
        for sent in self.sends(parameter, layout, storage, unit):
            used[sent.resource] += sent.seconds
        if self.spaces.backward and parameter.trainable:
            true = training.true_item(value)
            used[Resource.STORED] += share[2] * true + share[1] * training.state_item(value)
            used[Resource.UPDATE] += self._update(share[1] * true)
        return used

    def count(self, shape: tuple[int, ...], layout: Layout) -> float:
        """How many elements of a parameter a device has."""
        key = (shape, layout)
        if key not in self._counts:
            self._counts[key] = local_elements(shape, layout, self.mesh)
        return self._counts[key]

    def shares(self, count: float, storage: Storage) -> dict[int, float]:
        """How many of a parameter's elements are kept of its optimizer state (1), gradient (2), and itself (3)."""
        parts, level = math.prod(self.mesh.sizes[axis] for axis, _ in storage), zero_level(storage)
        return {at: count / parts if level >= at else count for at in (1, 2, 3)}

    def sends(
        self, parameter: Parameter, layout: Layout, storage: Storage, unit: float
    ) -> Iterator[ParameterCollective]:
        """The collectives of a parameter in a step."""
        value, training = self.graph.values[parameter.value], self.training
        count = self.count(value.shape, layout)
        axes, level = tuple(axis for axis, _ in storage), zero_level(storage)
        parts = math.prod(self.mesh.sizes[axis] for axis in axes)
        moving, wire = training.item(value), training.reduced_item(value)
        pack = unit * count / max(value.elements, 1)
        summed = tuple(axis for axis, place in layout.rest if place == REPLICATE)
        rest = tuple(axis for axis in summed if axis not in axes)
        backward, traits = self.spaces.backward, self.moves.traits

        def sent(
            resource: Resource, kind: Collective, elements: float, over: tuple[str, ...], size: float
        ) -> ParameterCollective:
            bucket = max(elements * size, pack * size if level == 3 else BUCKET)
            times = 1.0 if level == 3 or resource == Resource.UPDATE else 1.0 / training.accumulate
            seconds = self.moves.collective(kind, bucket, over) * elements * size / bucket * times
            copies = 6 if traits.copies and kind != "all_reduce" else 2  # see `BackendTraits`
            return ParameterCollective(
                resource, kind, over, seconds + times * self.moves.copy(copies * elements * size)
            )

        if level == 3:
            yield sent(Resource.BESIDE_FORWARD, "all_gather", count, axes, moving)
            if backward:
                yield sent(Resource.BESIDE_BACKWARD, "all_gather", count, axes, moving)
        if not backward or not parameter.trainable:
            return
        if level >= 2:
            yield sent(Resource.BESIDE_BACKWARD, "reduce_scatter", count, axes, wire)
            if rest:
                yield sent(Resource.BESIDE_BACKWARD, "all_reduce", count / parts, rest, wire)
        elif summed:
            yield sent(Resource.BESIDE_BACKWARD, "all_reduce", count, summed, wire)
        if level in (1, 2):
            yield sent(Resource.UPDATE, "all_gather", count, axes, moving)

    def _update(self, bytes: float) -> float:
        """Seconds of the optimizer for so many bytes of a parameter.

        On a GPU it goes over all parameters at once. On a CPU it goes over one after the other, so that what a kernel
        finds was brought to the cache by the one before; only what is read first comes from memory, half of a fused
        step.
        """
        states, device, name, large = self.training.states(), self.moves.device, self.training.optimizer, float(BUCKET)
        if self.moves.traits.foreach:
            return update_time(large, large, large * states, device, optimizer=name) * bytes / large
        if self.moves.traits.fuses(name):
            return update_time(bytes, bytes, bytes * states, device, optimizer=name, fused=True)
        first = update_time(large, large, large * states, device, optimizer=name, fused=True) * bytes / large
        return first / 2 + update_time(bytes, bytes, bytes * states, device, optimizer=name, kernels=KERNELS)


def zero_level(storage: Storage) -> int:
    """The ZeRO level of a storage; all its axes have the same."""
    return storage[0][1] if storage else 0

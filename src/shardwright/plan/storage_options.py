"""The options for a parameter: each layout that a use asks for, with each storage that goes with it, and its price.

What a storage keeps and sends it says itself (`storage`). Collectives of parameters go in buckets, or where parameters
are gathered, in units, so each pays its part of the bucket's latency.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

import numpy as np

from ..cluster import Collective
from ..cost import local_elements
from ..cost.resources import COUNT, Resource
from ..cost.time import update_time
from ..errors import PlanError
from ..ir import Parameter
from ..ir.graph import ITEM_SIZE
from ..ir.paths import layer_of
from ..layout import INVARIANT, REPLICATE, Layout
from ..storage import SHARDED_KINDS, Replicated, Storage, StoredElements, restricted
from .limits import StorageLimit
from .spaces import ChoiceSpaces

BUCKET = 25 * 2**20
"""Bytes that the runtime sums at once."""

OVERLAPPED_WITH = {
    "forward": Resource.BESIDE_FORWARD, "backward": Resource.BESIDE_BACKWARD, "update": Resource.UPDATE
}  # fmt: skip
"""The resource that a collective of a phase takes."""

SLOWED = {
    Resource.BESIDE_FORWARD: Resource.COMPUTE_FORWARD, Resource.BESIDE_BACKWARD: Resource.COMPUTE_BACKWARD
}  # fmt: skip
"""The kernels that run beside it."""

UNITS, GRADIENTS = 2.0, 2.0
"""Of ZeRO-3 in backward: layers that are gathered at once, and layers whose gradients are being summed."""

KERNELS = 8
"""Of an optimizer's step on one parameter."""


class StorageExcluded(PlanError):
    """Constraints leave a parameter no storage on a mesh."""


class ParameterCollective(NamedTuple):
    """A collective of a parameter, its part of the bucket that it goes in, and the copy into that bucket."""

    resource: Resource
    collective: Collective
    axes: tuple[str, ...]
    seconds: float
    bytes: float  # as in `cluster.collective`, on average over all backwards of a step
    slowdown: float = 0.0  # how much longer kernels take that run beside it, which share the memory


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
        limits: Mapping[str, StorageLimit] | None = None,
    ) -> None:
        """`fixed`: the storage of every parameter, if it is known. `limits`: how some may be stored, by key."""
        self.spaces, self.moves, self.training = spaces, spaces.moves, spaces.training
        self.graph, self.mesh = spaces.analysis.graph, spaces.mesh
        self.fixed, self.limits = fixed, limits or {}
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
        if not layouts:
            raise StorageExcluded(f"no storage of {parameter.key} is within its limits on {self.mesh}")
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
            yield restricted(self.fixed.get(parameter.key, Replicated()), free)
            return
        options: list[Storage] = [Replicated()]
        for kind in SHARDED_KINDS:
            if parameter.trainable or kind.shards_parameter:  # else it has neither gradient nor optimizer state
                for count in range(1, len(free) + 1):
                    options += [kind(axes) for axes in combinations(free, count)]
        limit = self.limits.get(parameter.key)
        yield from options if limit is None else limit.allowed(options, parameter.trainable)

    def _may_store(self, parameter: Parameter, layout: Layout, axis: str) -> bool:
        placement = layout.placement(axis)
        return placement == REPLICATE if parameter.trainable else placement is not None

    def _used(self, parameter: Parameter, layout: Layout, storage: Storage, unit: float) -> np.ndarray:
        value, training = self.graph.values[parameter.value], self.training
        used = np.zeros(COUNT)
        count, stored = self.count(value.shape, layout), ITEM_SIZE.get(value.dtype, 4)
        share = self.stored(count, storage)
        used[Resource.STORED] = share.parameter * stored
        if not storage.shards_parameter and training.item(value) != stored:
            used[Resource.KEPT] = count * training.item(value)  # the cast that autocast keeps for backward
        if storage.shards_parameter:
            used[Resource.PASSING] = self._gathered(parameter, count * training.item(value))
        for sent in self.sends(parameter, layout, storage, unit):
            used[sent.resource] += sent.seconds
            if sent.resource in SLOWED:
                used[SLOWED[sent.resource]] += sent.slowdown
        if self.spaces.backward and parameter.trainable:
            true = training.true_item(value)
            used[Resource.STORED] += share.gradient * true + share.state * training.state_item(value)
            used[Resource.UPDATE] += self._update(share.updated * true)
            if storage.update_copies:
                used[Resource.UPDATE] += self.moves.copy(storage.update_copies * share.updated * true)
        return used

    def _gathered(self, parameter: Parameter, bytes: float) -> float:
        """Bytes of a mean moment for a parameter that ZeRO-3 gathers; what is outside of layers stays gathered."""
        if not layer_of(parameter.key):
            return bytes
        trained = parameter.trainable and self.spaces.backward
        return bytes * (UNITS + GRADIENTS * trained) * self.spaces.kinds.layer_share

    def count(self, shape: tuple[int, ...], layout: Layout) -> float:
        """How many elements of a parameter a device has."""
        key = (shape, layout)
        if key not in self._counts:
            self._counts[key] = local_elements(shape, layout, self.mesh)
        return self._counts[key]

    def stored(self, count: float, storage: Storage) -> StoredElements:
        """What a device stores of a parameter of which it computes with `count` elements."""
        return storage.stored(count, storage.parts(self.mesh.sizes))

    def sends(
        self, parameter: Parameter, layout: Layout, storage: Storage, unit: float
    ) -> Iterator[ParameterCollective]:
        """The collectives of a parameter in a step."""
        value, training = self.graph.values[parameter.value], self.training
        count = self.count(value.shape, layout)
        parts = storage.parts(self.mesh.sizes)
        moving, wire = training.item(value), training.reduced_item(value)
        pack = unit * count / max(value.elements, 1)
        summed = tuple(axis for axis, place in layout.rest if place == REPLICATE)
        for sent in storage.collectives(summed, parameter.trainable, self.spaces.backward):
            resource, size = OVERLAPPED_WITH[sent.phase], wire if sent.of_gradient else moving
            elements = count / parts if sent.of_share else count
            in_units = storage.shards_parameter  # with every microbatch, where other gradients add up first
            bucket = max(elements * size, pack * size if in_units else BUCKET)
            times = 1.0 if in_units or resource == Resource.UPDATE else 1.0 / training.accumulate
            seconds = self.moves.collective(sent.collective, bucket, sent.axes) * elements * size / bucket * times
            slowdown = seconds * self.moves.memory_share(sent.axes)
            copies = 6 if self.moves.traits.copies and sent.collective != "all_reduce" else 2  # see `BackendTraits`
            seconds += times * self.moves.copy(copies * elements * size)
            bytes = times * elements * size
            yield ParameterCollective(resource, sent.collective, sent.axes, seconds, bytes, slowdown)

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

"""The description of one parameter, from lowering to the generated file, the runtime and checkpoints.

A `ParameterSpec` has the parameter's keys in the original state dict, its full shape, the layout it is computed with,
the axes over which its gradient is a pending sum, and its storage. A parameter that is computed with in less than
float32 may have an fp32 master weight, sharded as the optimizer state is: that is the parameter's true value.

There are two layouts besides the one of compute: `storage_layout` is that of whatever is sharded for storage, and
`stored_layout` that of the parameter itself, which most kinds of storage leave as it is computed with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import LayoutError, raise_all
from ..layout import REPLICATE, Axis, Layout, Mesh, contiguous_shard
from .replicated import Replicated, restricted
from .storage import Storage


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of the original model, and how it is stored. Tied weights have several keys.

    value   its name in the graph, where there is one
    unit    the layer with which it is gathered, if it has to be and is in a layer
    """

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    layout: Layout
    trainable: bool = True
    storage: Storage = field(default_factory=Replicated)
    unit: str = ""
    master: bool = False
    value: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        faults = []
        if self.master and not (self.trainable and "float" in self.dtype):
            faults.append("a master is for what is trained and floats")
        if not self.keys:
            faults.append("it has no key")
        if len(self.layout.shards) != len(self.shape):
            faults.append(
                f"its layout has {len(self.layout.shards)} dims, its shape {self.shape} has {len(self.shape)}"
            )
        for axis in self.storage.axes:
            if self.layout.shard_of(axis) is not None:
                faults.append(f"{axis} already shards it, so {self.storage.title} has nothing to split there")
            elif self.trainable and axis not in self.sums:
                faults.append(
                    f"{self.storage.title} over {axis} needs its gradient to be summed over {axis}; "
                    f"add {axis!r} to its sums"
                )
        raise_all(LayoutError, f"parameter {', '.join(self.keys)} can't be stored so:", faults)

    @property
    def name(self) -> str:
        """The first of its keys."""
        return self.keys[0]

    @property
    def sums(self) -> tuple[str, ...]:
        """The axes over which the gradient must be summed."""
        return tuple(axis for axis, placement in self.layout.rest if placement == REPLICATE)

    @property
    def true_dtype(self) -> str:
        """The dtype of its true value and of its gradient."""
        return "float32" if self.master else self.dtype


def storage_layout(spec: ParameterSpec, sizes: Mapping[str, int]) -> Layout:
    """The compute layout, further sharded over the storage's axes. What can't be split (a scalar) is replicated."""
    layout = spec.layout
    for name in spec.storage.axes:
        lengths = _even_lengths(layout, spec.shape, sizes)
        roomy = [dim for dim, length in enumerate(lengths) if length >= sizes[name]]
        if roomy or max(lengths, default=0) > 1:
            dim = roomy[0] if roomy else lengths.index(max(lengths))
            layout = layout.with_shard(dim, contiguous_shard(Axis(name=name, size=sizes[name]), lengths[dim]))
    return layout


def _even_lengths(layout: Layout, shape: Sequence[int], sizes: Mapping[str, int]) -> list[int]:
    """What is left of each dim, or 0 for a dim that another axis shards unevenly: no shard can be minor to that."""
    lengths = []
    for size, shards in zip(shape, layout.shards, strict=True):
        even = all(sharding.even(sizes[sharding.axis]) for sharding in shards)
        for sharding in shards:
            size = sharding.local(sizes[sharding.axis], 0)
        lengths.append(size if even else 0)
    return lengths


def stored_layout(spec: ParameterSpec, sizes: Mapping[str, int]) -> Layout:
    """The layout of the tensor that is kept as the parameter."""
    return storage_layout(spec, sizes) if spec.storage.shards_parameter else spec.layout


def zero_axes(spec: ParameterSpec, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The axes of its storage that really split something and have more than one rank."""
    layout = storage_layout(spec, sizes)
    return tuple(name for name in spec.storage.axes if sizes[name] > 1 and layout.shard_of(name) is not None)


def effective_storage(spec: ParameterSpec, sizes: Mapping[str, int]) -> Storage:
    """Its storage over the axes that really split something: replicated, if none does."""
    return restricted(spec.storage, zero_axes(spec, sizes))


def sharding_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes, longer than one, over which shards differ, in the mesh's order."""
    return tuple(axis.name for axis in mesh.axes if axis.size > 1 and layout.shard_of(axis.name) is not None)


def summing_axes(spec: ParameterSpec, mesh: Mesh) -> tuple[str, ...]:
    """The axes, longer than one, over which the gradient is summed, in the mesh's order."""
    return tuple(axis.name for axis in mesh.axes if axis.size > 1 and axis.name in spec.sums)


def wanted_groups(specs: Iterable[ParameterSpec], mesh: Mesh) -> set[tuple[str, ...]]:
    """The products of axes over which gradients and storage communicate; pass them to `Groups`."""
    wanted = set()
    for spec in specs:
        split = zero_axes(spec, mesh.sizes)
        sums = summing_axes(spec, mesh)
        wanted |= {split, sums, tuple(axis for axis in sums if axis not in split)}
    return {axes for axes in wanted if axes}

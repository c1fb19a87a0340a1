"""How a parameter is stored on a rank, and how the generated file writes it down.

A `ParameterSpec` describes one parameter: its keys in the original state dict, its full shape, the
layout it is computed with, the axes over which its gradient is a pending sum, and its ZeRO level:

    level   parameter    gradient     optimizer state     on the zero axis
    -----   ----------   ----------   ---------------
      1     replicated   replicated   sharded
      2     replicated   sharded      sharded
      3     sharded      sharded      sharded

All three levels shard in the same way, by `storage_layout`, so that an optimizer state saved under
one level fits another. A parameter that is computed with in less than float32 may have an fp32
master weight, sharded as the optimizer state is: that is the parameter's true value.

`ParameterEntry` and `shard` appear in the PARAMETERS table of a generated file; `parse` turns that
table into specs. `shard_tensor` and `gather_tensor` go between full tensors and shards. Autograd has
no part in anything here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from shardwright.errors import LayoutError, raise_all
from shardwright.layout import (
    REPLICATE,
    Axis,
    Block,
    Layout,
    Mesh,
    Shard,
    contiguous_shard,
    make_layout,
    make_shard,
)

from ..collectives import blocks, process_group
from ..world import Groups


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSpec:
    """One parameter of the original model, and how it is stored. Tied weights have several keys."""

    keys: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    layout: Layout
    trainable: bool = True
    zero: tuple[tuple[str, int], ...] = ()
    unit: str = ""
    master: bool = False

    def __post_init__(self) -> None:
        faults = []
        if self.master and not (self.trainable and self.dtype.is_floating_point):
            faults.append("a master is for what is trained and floats")
        if not self.keys:
            faults.append("it has no key")
        if len(self.layout.shards) != len(self.shape):
            faults.append(
                f"its layout has {len(self.layout.shards)} dims, its shape {self.shape} has {len(self.shape)}"
            )
        if len({level for _, level in self.zero}) > 1 or any(level not in (1, 2, 3) for _, level in self.zero):
            faults.append(f"its zero levels are {self.zero}; use one level, 1, 2 or 3, for all axes")
        for axis, _ in self.zero:
            if self.layout.shard_of(axis) is not None:
                faults.append(f"{axis} already cuts it, so zero has nothing to split there")
            elif self.trainable and axis not in self.sums:
                faults.append(f"zero over {axis} needs its gradient to be summed over {axis}; add {axis!r} to its sums")
        raise_all(LayoutError, f"parameter {', '.join(self.keys)} can't be held so:", faults)

    @property
    def name(self) -> str:
        """The first of its keys."""
        return self.keys[0]

    @property
    def sums(self) -> tuple[str, ...]:
        """The axes over which the gradient must be summed."""
        return tuple(axis for axis, placement in self.layout.rest if placement == REPLICATE)

    @property
    def true_dtype(self) -> torch.dtype:
        """The dtype of its true value and of its gradient."""
        return torch.float32 if self.master else self.dtype

    @property
    def level(self) -> int:
        """The ZeRO level, 0 for none."""
        return self.zero[0][1] if self.zero else 0


def storage_layout(spec: ParameterSpec, sizes: Mapping[str, int]) -> Layout:
    """The compute layout, further cut by the zero axes. What can't be cut (a scalar) stays whole there."""
    layout = spec.layout
    for name, _ in spec.zero:
        lengths = _even_lengths(layout, spec.shape, sizes)
        roomy = [dim for dim, length in enumerate(lengths) if length >= sizes[name]]
        if roomy or max(lengths, default=0) > 1:
            dim = roomy[0] if roomy else lengths.index(max(lengths))
            layout = layout.with_shard(dim, contiguous_shard(Axis(name=name, size=sizes[name]), lengths[dim]))
    return layout


def _even_lengths(layout: Layout, shape: Sequence[int], sizes: Mapping[str, int]) -> list[int]:
    """What is left of each dim, or 0 for a dim that another axis cuts unevenly: no cut can be minor to that."""
    lengths = []
    for size, shards in zip(shape, layout.shards, strict=True):
        even = all(sharding.even(sizes[sharding.axis]) for sharding in shards)
        for sharding in shards:
            size = sharding.local(sizes[sharding.axis], 0)
        lengths.append(size if even else 0)
    return lengths


def stored_layout(spec: ParameterSpec, sizes: Mapping[str, int]) -> Layout:
    """The layout of the tensor that is really kept as the parameter: split further only by level 3."""
    return storage_layout(spec, sizes) if spec.level == 3 else spec.layout


def zero_axes(spec: ParameterSpec, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """The zero axes that really cut something and have more than one rank."""
    layout = storage_layout(spec, sizes)
    return tuple(name for name, _ in spec.zero if sizes[name] > 1 and layout.shard_of(name) is not None)


def sharding_axes(layout: Layout, mesh: Mesh) -> tuple[str, ...]:
    """The axes, longer than one, over which pieces differ, in the mesh's order."""
    return tuple(axis.name for axis in mesh.axes if axis.size > 1 and layout.shard_of(axis.name) is not None)


def wanted_groups(specs: Iterable[ParameterSpec], mesh: Mesh) -> set[tuple[str, ...]]:
    """The products of axes that gradients and ZeRO need; pass them to `Groups`."""
    wanted = set()
    for spec in specs:
        split = zero_axes(spec, mesh.sizes)
        sums = summing_axes(spec, mesh)
        wanted |= {split, sums, tuple(axis for axis in sums if axis not in split)}
    return {axes for axes in wanted if axes}


def summing_axes(spec: ParameterSpec, mesh: Mesh) -> tuple[str, ...]:
    """The axes, longer than one, over which the gradient is summed, in the mesh's order."""
    return tuple(axis.name for axis in mesh.axes if axis.size > 1 and axis.name in spec.sums)


def coordinates(groups: Groups) -> dict[str, int]:
    """Where this rank stands on each axis of the mesh."""
    return {name: groups[name].index for name in groups.mesh.names}


# -- between full tensors and shards ---------------------------------------------------


def shard_tensor(
    full: Tensor, spec: ParameterSpec, sizes: Mapping[str, int], at: Mapping[str, int], layout: Layout | None = None
) -> Tensor:
    """This rank's shard of a full tensor (a value or a gradient), with its own memory."""
    if tuple(full.shape) != spec.shape:
        raise LayoutError(
            f"parameter {spec.name} has shape {spec.shape}, got a tensor of shape {tuple(full.shape)}; "
            "load a state dict of the model that was compiled"
        )
    local = full.detach().as_subclass(Tensor)
    for dim, shards in enumerate((layout or stored_layout(spec, sizes)).shards):
        for sharding in shards:
            local = blocks.shard(local, dim, sharding, sizes[sharding.axis], at[sharding.axis])
    return local.clone(memory_format=torch.contiguous_format)


def gather_tensor(local: Tensor, spec: ParameterSpec, groups: Groups, layout: Layout | None = None) -> Tensor:
    """The full tensor from every rank's shard, on every rank. All ranks of the mesh must call it."""
    sizes = groups.mesh.sizes
    full = local.detach().as_subclass(Tensor)
    for dim, shards in enumerate((layout or stored_layout(spec, sizes)).shards):
        for sharding in reversed(shards):  # only the minor-most shard can be joined directly
            full = _gather_shard(full, dim, sharding, groups)
    return full.clone() if full.data_ptr() == local.data_ptr() else full


def _gather_shard(local: Tensor, dim: int, sharding: Shard, groups: Groups) -> Tensor:
    group = groups[sharding.axis]
    if group.process_group is None:
        return local
    mine = blocks.fill(local, dim, sharding, group.size, group.index).contiguous()
    every = mine.new_empty((group.size, *mine.shape))
    process_group.all_gather(every.view(-1), mine.view(-1), group.process_group).wait()
    return blocks.unstack(every, dim, sharding).contiguous()


# -- the words of a generated file --------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ShardEntry:
    """A plain contiguous shard as it is written, before the size of its dim is known."""

    axis: str
    blocks: tuple[Block, ...] = ()
    repeat: int = 1


def shard(axis: str, *runs: int | tuple[int, int, int], repeat: int = 1) -> Shard | ShardEntry:
    """`shard("tp")`; `shard("tp", 3, 8, 32)` for a dim (3 h e); `shard("tp", (1, 32, 64), (2, 8, 64))` for sections."""
    sections: list[tuple[int, int, int]] = [run for run in runs if isinstance(run, tuple)]
    loose = [run for run in runs if isinstance(run, int)]
    if loose:
        if sections or len(loose) != 3:
            raise LayoutError(f"shard({axis!r}, {', '.join(map(str, runs))}): write three numbers, or tuples of three")
        sections = [(loose[0], loose[1], loose[2])]
    if not sections:
        return ShardEntry(axis)
    return Shard(axis=axis, blocks=tuple(Block(*run) for run in sections), repeat=repeat)


@dataclass(frozen=True, slots=True, kw_only=True)
class ParameterEntry:
    """How a parameter is stored, as written in the PARAMETERS table of a generated file."""

    shape: tuple[int, ...]
    shards: Mapping[int, Shard | ShardEntry | tuple[Shard | ShardEntry, ...]] = field(default_factory=dict)
    sums: tuple[str, ...] = ()
    zero: Mapping[str, int] = field(default_factory=dict)
    frozen: bool = False
    dtype: torch.dtype = torch.float32
    tied: tuple[str, ...] = ()
    unit: str = ""


def parse(table: Mapping[str, ParameterEntry], mesh: Mesh, keys: Sequence[str]) -> list[ParameterSpec]:
    """The PARAMETERS table as specs, in the order of the real `keys`; a `*` stands for one part of a key."""
    exact = {key: (entry, ()) for key, entry in table.items() if "*" not in key}
    stars = [(_pattern(key), entry) for key, entry in table.items() if "*" in key]
    specs: list[ParameterSpec] = []
    tied: set[str] = set()
    faults = []
    for key in keys:
        if key in tied:
            continue
        fits = [exact[key]] if key in exact else [(p, m.groups()) for r, p in stars if (m := r.fullmatch(key))]
        if len(fits) != 1:
            faults.append(f"{key} is described by {len(fits)} entries of PARAMETERS, it needs one")
            continue
        spec = _parse_entry(key, fits[0][0], fits[0][1], mesh)
        tied.update(spec.keys[1:])
        specs.append(spec)
    raise_all(LayoutError, f"PARAMETERS does not fit the model's {len(keys)} parameters:", faults)
    return specs


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(re.escape(part) for part in key.split("*")))


def _filled(text: str, stars: Sequence[str]) -> str:
    for star in stars:
        text = text.replace("*", star, 1)
    return text


def _parse_entry(key: str, entry: ParameterEntry, stars: Sequence[str], mesh: Mesh) -> ParameterSpec:
    shards: list[list[Shard]] = []
    for dim, size in enumerate(entry.shape):
        written = entry.shards.get(dim, ())
        shards.append([])
        for text in written if isinstance(written, tuple) else (written,):
            axis = mesh.axis(text.axis)
            sharding = make_shard(axis, text.blocks, text.repeat) if text.blocks else contiguous_shard(axis, size)
            if sharding.elements != size:
                raise LayoutError(
                    f"{key}: sharding dim {dim} over {axis.name} covers {sharding.elements} elements, {size} are left"
                )
            shards[-1].append(sharding)
            size = sharding.local(axis.size, 0)
    return ParameterSpec(
        keys=(key, *(_filled(other, stars) for other in entry.tied)),
        shape=entry.shape,
        dtype=entry.dtype,
        layout=make_layout(shards, {mesh.axis(name).name: REPLICATE for name in entry.sums}),
        trainable=not entry.frozen,
        zero=tuple(entry.zero.items()),
        unit=_filled(entry.unit, stars),
    )


def name_some(names: Sequence[str]) -> str:
    """Some names of many."""
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"

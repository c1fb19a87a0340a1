"""The PARAMETERS table of a generated file: `ParameterEntry` and `shard` are what it is written with.

An entry may stand for the same parameter of many layers (`blocks.*.qkv.weight`), and leaves out what follows from the
mesh. `parse` turns the table into a `ParameterSpec` for each parameter.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from shardwright.errors import LayoutError, raise_all
from shardwright.layout import REPLICATE, Block, Mesh, Shard, contiguous_shard, make_layout, make_shard
from shardwright.storage import ParameterSpec, parse_storage


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
    zero: Mapping[str, int | str] = field(default_factory=dict)
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
        dtype=str(entry.dtype).removeprefix("torch."),
        layout=make_layout(shards, {mesh.axis(name).name: REPLICATE for name in entry.sums}),
        trainable=not entry.frozen,
        storage=parse_storage(entry.zero),
        unit=_filled(entry.unit, stars),
    )

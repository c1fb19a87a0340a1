"""The PARAMETERS table of a generated file: how each parameter is stored, equal layers written once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from ..ir.graph import ITEM_SIZE
from ..ir.paths import numbered_layer
from ..layout import REPLICATE, Shard
from ..lower import LoweredProgram, Size
from ..ops.printing import plain, show_shard
from ..storage import ParameterSpec
from .sizes import SizeNames


def parameter_table(program: LoweredProgram, class_name: str, sizes: SizeNames) -> Iterator[str]:
    numbers = {spec.name: parameter_text(spec, program, None) for spec in program.parameters}
    named = {spec.name: parameter_text(spec, program, sizes) for spec in program.parameters}
    units = {spec.name: spec.unit for spec in program.parameters}
    yield f"PARAMETERS = {{  # key in {class_name}.state_dict() -> how it is stored"
    for key, text in _starred(numbers, named, units).items():
        yield f'    "{key}": {text},'
    yield "}"


def parameter_text(spec: ParameterSpec, program: LoweredProgram, sizes: SizeNames | None) -> str:
    """The entry of a parameter, with the names of sizes or with numbers."""
    parts = program.mesh.sizes
    local = program.sizes_of(spec.value)
    named = [str(size) for size in spec.shape]
    if sizes is not None:
        named = [sizes.text(size.global_size()).replace(" ", "") for size in local]
    shown = [f"shape=({', '.join(named)}{',' if len(named) == 1 else ''})"]
    shards = []
    for dim, split in enumerate(spec.layout.shards):
        inner = [None if sizes is None else _inner_sizes(c, local[dim], sizes) for c in split]
        texts = [
            f'shard("{c.axis}")' if plain(c, parts[c.axis]) else show_shard(c, names)
            for c, names in zip(split, inner, strict=True)
        ]
        if texts:
            shards.append(f"{dim}: {texts[0] if len(texts) == 1 else '(' + ', '.join(texts) + ')'}")
    if shards:
        shown.append(f"shards={{{', '.join(shards)}}}")
    sums = [name for name in program.mesh.names if spec.layout.placement(name) == REPLICATE]
    if sums:
        shown.append(f"sums=({', '.join(repr(name) for name in sums)},)".replace("'", '"'))
    if spec.storage.axes:
        shown.append(f"zero={spec.storage.written()}".replace("'", '"'))
    if not spec.trainable:
        shown.append("frozen=True")
    if spec.dtype != "float32":
        shown.append(f"dtype=torch.{spec.dtype}")
    if len(spec.keys) > 1:
        shown.append("tied=(" + "".join(f'"{key}", ' for key in spec.keys[1:]).rstrip() + ")")
    if spec.unit:
        shown.append(f'unit="{spec.unit}"')
    return f"ParameterEntry({', '.join(shown)})"


def _inner_sizes(shard: Shard, size: Size, names: SizeNames) -> list[str]:
    """The `inner` of each block by name: 3 * H * E sharded on H is 3 runs of units of h * E elements."""
    texts = [str(block.inner) for block in shard.blocks]
    if shard.repeat != 1 or len(size.sections) != len(shard.blocks):
        return texts
    for number, (block, section) in enumerate(zip(shard.blocks, size.sections, strict=True)):
        at = next((at for at, factor in enumerate(section) if factor.axes == (shard.axis,)), len(section))
        inner = Size((section[at:],))
        evenly = at < len(section) and section[at].size % block.size == 0
        if evenly and math.prod(factor.size for factor in section[at:]) == block.size * block.inner:
            text = names.text(inner).replace(" ", "")
            texts[number] = texts[number] if "self." in text else text  # where ranks differ, nobody knows it yet
    return texts


def bytes_per_rank(spec: ParameterSpec, sizes: Mapping[str, int]) -> int:
    """What the first rank keeps of a parameter."""
    total = math.prod(spec.layout.local_shape(spec.shape, sizes, dict.fromkeys(sizes, 0)))
    total = math.ceil(spec.storage.stored(total, spec.storage.parts(sizes)).parameter)
    return total * ITEM_SIZE.get(spec.dtype, 4)


def _starred(numbers: Mapping[str, str], named: Mapping[str, str], units: Mapping[str, str]) -> dict[str, str]:
    """Keys that differ only in the layer's number and are stored alike, once: by names that all of them have."""

    def star(key: str) -> str:
        layer = numbered_layer(key)
        if layer is None:
            return key
        lead = f"{layer[0]}." if layer[0] else ""
        return f"{lead}*{key[len(lead) + len(str(layer[1])) :]}"

    def starred_text(key: str, text: str) -> str:
        return text.replace(f'unit="{units[key]}"', f'unit="{star(units[key])}"')

    def texts_of(rows: Mapping[str, str]) -> dict[str, set[str]]:
        texts: dict[str, set[str]] = {}
        for key, text in rows.items():
            texts.setdefault(star(key), set()).add(starred_text(key, text))
        return texts

    in_numbers, in_names = texts_of(numbers), texts_of(named)
    starred: dict[str, str] = {}
    for key, text in named.items():
        alike = len(in_numbers[star(key)]) == 1 and "tied=" not in text
        row = text if not alike or len(in_names[star(key)]) == 1 else numbers[key]
        starred[star(key) if alike else key] = starred_text(key, row) if alike else row
    return starred


def unit_ranges(units: list[str]) -> Iterator[str]:
    """Unit names, runs of layers written as a range."""
    at = 0
    while at < len(units):
        layer = numbered_layer(units[at])
        end = at + 1
        while layer and end < len(units) and numbered_layer(units[end]) == (layer[0], layer[1] + end - at):
            end += 1
        if layer and end - at > 2:
            lead = f"{layer[0]}." if layer[0] else ""
            first = f"{layer[1]}, " if layer[1] else ""
            yield f'*(f"{lead}{{i}}" for i in range({first}{layer[1] + end - at}))'
        else:
            yield from (f'"{unit}"' for unit in units[at:end])
        at = end

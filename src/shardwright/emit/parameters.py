"""The PARAMETERS table of a generated file: how each parameter is stored, equal layers said once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from ..ir.graph import ITEM_SIZE
from ..layout import REPLICATE
from ..lower import LoweredProgram
from ..ops.printing import plain, show_shard
from ..storage import ParameterSpec
from .layers import layer_of


def parameter_table(program: LoweredProgram, class_name: str) -> Iterator[str]:
    rows = {spec.name: parameter_text(spec, program) for spec in program.parameters}
    units = {spec.name: spec.unit for spec in program.parameters}
    yield f"PARAMETERS = {{  # key in {class_name}.state_dict() -> how it is stored"
    for key, text in _starred(rows, units).items():
        yield f'    "{key}": {text},'
    yield "}"


def parameter_text(spec: ParameterSpec, program: LoweredProgram) -> str:
    parts = program.mesh.sizes
    shown = [f"shape={_tuple(spec.shape)}"]
    shards = []
    for dim, split in enumerate(spec.layout.shards):
        texts = [f'shard("{c.axis}")' if plain(c, parts[c.axis]) else show_shard(c) for c in split]
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


def _tuple(shape: Sequence[int]) -> str:
    return f"({', '.join(map(str, shape))}{',' if len(shape) == 1 else ''})"


def bytes_per_rank(spec: ParameterSpec, sizes: Mapping[str, int]) -> int:
    """What the first rank keeps of a parameter."""
    total = math.prod(spec.layout.local_shape(spec.shape, sizes, dict.fromkeys(sizes, 0)))
    total = math.ceil(spec.storage.stored(total, spec.storage.parts(sizes)).parameter)
    return total * ITEM_SIZE.get(spec.dtype, 4)


def _starred(rows: Mapping[str, str], units: Mapping[str, str]) -> dict[str, str]:
    """Keys that differ only in the layer's number and are held alike, said once."""

    def star(key: str) -> str:
        layer = layer_of(key)
        if layer is None:
            return key
        lead = f"{layer[0]}." if layer[0] else ""
        return f"{lead}*{key[len(lead) + len(str(layer[1])) :]}"

    def starred_text(key: str, text: str) -> str:
        return text.replace(f'unit="{units[key]}"', f'unit="{star(units[key])}"')

    texts: dict[str, set[str]] = {}
    for key, text in rows.items():
        texts.setdefault(star(key), set()).add(starred_text(key, text))
    starred: dict[str, str] = {}
    for key, text in rows.items():
        alike = len(texts[star(key)]) == 1 and "tied=" not in text
        starred[star(key) if alike else key] = starred_text(key, text) if alike else text
    return starred


def unit_ranges(units: list[str]) -> Iterator[str]:
    """Unit names, runs of layers said with a range."""
    at = 0
    while at < len(units):
        layer = layer_of(units[at])
        end = at + 1
        while layer and end < len(units) and layer_of(units[end]) == (layer[0], layer[1] + end - at):
            end += 1
        if layer and end - at > 2:
            lead = f"{layer[0]}." if layer[0] else ""
            first = f"{layer[1]}, " if layer[1] else ""
            yield f'*(f"{lead}{{i}}" for i in range({first}{layer[1] + end - at}))'
        else:
            yield from (f'"{unit}"' for unit in units[at:end])
        at = end

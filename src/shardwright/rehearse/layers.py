"""Fewer layers: of a run of equal layers only some are kept, and readers of the others read those.

Two layers of a list ("model.layers.3", "model.layers.4") are of one kind if they have the same ops on the same shapes,
connected alike, split, stored and recomputed alike, in the same stage. The first two and the last of each kind are
kept, so that every border between layers still exists:

    A A A A A A B B B B B        A A . . . A B B . . B        A A A B B B, renumbered

What a layer computes does not matter: a value of a dropped layer is replaced by the same value of the nearest kept
layer of its kind before it, which has the same shape. The result is another model with the same structure, compared
with itself on one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from ..ir import Buffer, Graph, Op, Parameter
from ..ir.paths import is_inside, prefixes
from ..rules import Choices
from ..storage import Storage

FIRST, LAST = 2, 1
"""How many layers of a kind are kept, from the start and from the end."""

Rename = Callable[[str], str | None]
"""Maps a path, a key or the name of an op to its name with fewer layers; None if its layer is dropped."""


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A graph, and a plan's decisions for its ops and parameters."""

    graph: Graph
    choices: Choices
    stage: Mapping[str, int]  # of each op
    storage: Mapping[str, Storage]  # by key of the parameter
    recompute: tuple[tuple[str, int], ...]  # (module, stage)
    chunked_loss: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayers:
    """The kept layers of a list."""

    path: str  # of the list: "model.layers"
    kept: tuple[int, ...]  # their original indices
    total: int

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {', '.join(map(str, self.kept))} of {self.total}"


def drop_layers(decided: Decided) -> tuple[Decided, tuple[KeptLayers, ...], Rename]:
    """The graph with a few layers of each kind, the kept layers, and the map of paths (None: dropped).

    Lists inside of layers are shortened after the outer ones.
    """
    notes: list[KeptLayers] = []
    renames: list[Rename] = []
    depth = 1
    while lists := _lists(decided.graph, depth):
        for parent in lists:
            shorter = _short(decided, parent)
            if shorter is not None:
                decided, kept, rename = shorter
                notes.append(kept)
                renames.append(rename)
        depth += 1

    def renamed(path: str) -> str | None:
        now: str | None = path
        for rename in renames:
            now = None if now is None else rename(now)
        return now

    return decided, tuple(notes), renamed


def _lists(graph: Graph, depth: int) -> tuple[str, ...]:
    """The paths of lists of modules that are inside of `depth - 1` other lists."""
    paths: dict[str, None] = {}
    for op in graph.ops:
        for path in prefixes(op.module_path):
            parts = path.split(".")
            if parts[-1].isdigit() and sum(part.isdigit() for part in parts) == depth:
                paths.setdefault(".".join(parts[:-1]))
    return tuple(paths)


def _short(decided: Decided, parent: str) -> tuple[Decided, KeptLayers, Rename] | None:
    """A graph with fewer layers of one list, or None if none can be dropped."""
    graph = decided.graph
    layers: dict[int, list[Op]] = {}
    for op in graph.ops:
        number = _number(op.module_path, parent)
        if number is not None:
            layers.setdefault(number, []).append(op)
    if len(layers) <= FIRST + LAST:
        return None
    kinds: dict[Any, list[int]] = {}
    for number in sorted(layers):
        kinds.setdefault(_kind(decided, parent, number, layers[number]), []).append(number)
    stands_for: dict[int, int] = {}
    for numbers in kinds.values():
        for number in numbers[FIRST:-LAST]:
            stands_for[number] = numbers[FIRST - 1]
    if not stands_for:
        return None
    values: dict[str, str] = {}
    gone: set[str] = set()
    for number, other in stands_for.items():
        for op, like in zip(layers[number], layers[other], strict=True):
            gone.add(op.name)
            values.update(zip(op.outputs, like.outputs, strict=True))
    kept = tuple(number for number in sorted(layers) if number not in stands_for)
    rename = partial(_renumbered, parent, _numbers(graph, parent, set(stands_for)))
    note = KeptLayers(path=parent, kept=kept, total=len(layers))
    return _without(decided, gone, values, rename), note, rename


def _number(path: str, parent: str) -> int | None:
    """The index of the layer of a list that a path is in."""
    lead = f"{parent}." if parent else ""
    match = re.match(r"\d+(?![^./@ ])", path[len(lead) :]) if path.startswith(lead) else None
    return int(match[0]) if match else None


def _numbers(graph: Graph, parent: str, gone: set[int]) -> dict[int, int]:
    """New consecutive indices for the rest of a list, including layers with parameters only."""
    keys = (key for tensor in graph.parameters for key in tensor.keys)
    paths = (*(op.module_path for op in graph.ops), *keys, *(tensor.key for tensor in graph.buffers))
    there = sorted({number for path in paths if (number := _number(path, parent)) is not None} - gone)
    return {number: at for at, number in enumerate(there)}


def _renumbered(parent: str, numbers: Mapping[int, int], path: str) -> str | None:
    """A path, a key or the name of an op, with the layer's new index; None if that layer was dropped."""
    number = _number(path, parent)
    if number is None:
        return path
    lead = f"{parent}." if parent else ""
    end = len(lead) + len(str(number))
    return f"{lead}{numbers[number]}{path[end:]}" if number in numbers else None


def _kind(decided: Decided, parent: str, number: int, ops: Sequence[Op]) -> Any:
    """The kind of a layer: layers of one kind are interchangeable."""
    graph, path = decided.graph, f"{parent}.{number}".lstrip(".")
    inside = {op.name for op in ops}
    reach = partial(_relative, path)
    positions = {name: at for at, name in enumerate(name for op in ops for name in op.outputs)}
    owned: dict[str, Parameter | Buffer] = {tensor.value: tensor for tensor in graph.parameters}
    owned |= {tensor.value: tensor for tensor in graph.buffers}
    outside: dict[str, int] = {}
    regions: dict[str, int] = {}
    shared = {op.region for op in graph.ops if op.name not in inside}

    def described(name: str) -> Any:
        value = graph.values[name]
        where: Any = positions.get(name)
        if where is None and name in owned:
            where = _owned(owned[name], reach, decided.storage)
        elif where is None:
            where = ("outside", outside.setdefault(name, len(outside)))
        return where, value.shape, value.dtype, value.gradient

    def region(op: Op) -> Any:
        if op.region is None or op.region in shared:
            return op.region
        return regions.setdefault(op.region, len(regions))

    ops_alike = tuple(
        (
            reach(op.name), op.target, _plain(op.arguments, reach), tuple(map(described, op.inputs)),
            tuple(described(name) for name in op.outputs), region(op), op.autocast, op.no_grad, decided.stage[op.name],
            tuple(sorted(decided.choices.get(op.name, {}).items())), decided.chunked_loss.get(op.name),
        )
        for op in ops
    )  # fmt: skip
    recomputed = tuple(sorted((reach(at), stage) for at, stage in decided.recompute if is_inside(at, path)))
    foreign = {tensor.update for tensor in graph.buffers if tensor.value and not is_inside(tensor.key, path)}
    odd = any(name in foreign for op in ops for name in op.outputs) or _lends(graph, path, inside)
    return ops_alike, recomputed, number if odd else None


def _lends(graph: Graph, path: str, inside: set[str]) -> bool:
    """Whether ops outside of a layer read its parameters or buffers."""
    own = [tensor.value for tensor in graph.parameters if all(is_inside(key, path) for key in tensor.keys)]
    own += [tensor.value for tensor in graph.buffers if is_inside(tensor.key, path)]
    return any(op.name not in inside for name in own for op, _ in graph.users[name])


def _owned(tensor: Parameter | Buffer, reach: Callable[[str], str], storage: Mapping[str, Storage]) -> Any:
    if isinstance(tensor, Buffer):
        return "buffer", reach(tensor.key), tensor.persistent, tensor.update is not None
    keys = tuple(map(reach, tensor.keys))
    return "parameter", keys, tensor.trainable, tuple(dict.fromkeys(storage.get(key) for key in tensor.keys))


def _relative(path: str, name: str) -> str:
    match = re.match(rf"{re.escape(path)}(?=[./@ ]|$)", name)
    return "~" + name[match.end() :] if match else name


def _plain(argument: Any, reach: Callable[[str], str]) -> Any:
    """Arguments in comparable form, without the layer's own path."""
    if isinstance(argument, tuple):
        return tuple(_plain(inner, reach) for inner in argument)
    return type(argument).__name__, reach(argument) if isinstance(argument, str) else repr(argument)


def _without(decided: Decided, gone: set[str], values: Mapping[str, str], rename: Rename) -> Decided:
    """The graph without some ops, whose values are replaced, and without the state of dropped modules."""
    graph = decided.graph
    names = {op.name: rename(op.name) or op.name for op in graph.ops if op.name not in gone}
    left = tuple(op for op in graph.ops if op.name in names)
    ops = tuple(_replaced(op, values, rename) for op in left)
    outputs = tuple(replace(output, value=values.get(output.value or "", output.value)) for output in graph.outputs)
    keys = ((parameter, tuple(filter(None, map(rename, parameter.keys)))) for parameter in graph.parameters)
    parameters = tuple(replace(parameter, keys=left_over) for parameter, left_over in keys if left_over)
    buffers = tuple(replace(buffer, key=key) for buffer in graph.buffers if (key := rename(buffer.key)) is not None)
    there = {name for op in ops for name in op.outputs} | {source.value for source in graph.inputs}
    there |= {parameter.value for parameter in parameters} | {buffer.value for buffer in buffers}
    small = replace(
        graph, ops=ops, outputs=outputs, parameters=parameters, buffers=buffers, returned=None,
        values={name: value for name, value in graph.values.items() if name in there},
    )  # fmt: skip
    recompute = dict.fromkeys((rename(path), stage) for path, stage in decided.recompute)
    return Decided(
        graph=small,
        choices={new: decided.choices.get(name, {}) for name, new in names.items()},
        stage={new: decided.stage[name] for name, new in names.items()},
        storage={new: stored for key, stored in decided.storage.items() if (new := rename(key)) is not None},
        recompute=tuple((path, stage) for path, stage in recompute if path is not None and path in small.under),
        chunked_loss={new: decided.chunked_loss[name] for name, new in names.items() if name in decided.chunked_loss},
    )


def _replaced(op: Op, values: Mapping[str, str], rename: Rename) -> Op:
    key = op.argument("op_key")
    op = op if key is None else op.with_arguments(op_key=rename(key))
    inputs = tuple(values.get(name, name) for name in op.inputs)
    path = rename(op.module_path) or op.module_path
    return replace(op, name=rename(op.name) or op.name, module_path=path, inputs=inputs)

"""Fewer layers: of a run of equal layers only some are kept, and what read the others reads those.

Two layers of a list ("model.layers.3", "model.layers.4") are of one kind if they have the same ops on the same shapes,
connected alike, split, stored and recomputed alike, in the same stage. Of each kind the first two and the last stay, so
that every border that there is between layers is still there:

    A A A A A A B B B B B        A A . . . A B B . . B        A A A B B B, numbered anew

Nothing has to be known of what a layer computes: a value of a layer that goes is replaced by the value in the same
place of the nearest layer of its kind before it, which has the same shape. The result is another model, of the same
structure, and it is compared with itself on one device.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from ..ir import Buffer, Graph, Op, Parameter
from ..ir.paths import is_inside, prefixes
from ..plan.plan import Choices

FIRST, LAST = 2, 1
"""How many layers of a kind are kept, from the start and from the end."""

Storage = Mapping[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True, kw_only=True)
class Decided:
    """A graph, and what a plan decides for its ops and parameters."""

    graph: Graph
    choices: Choices
    stage: Mapping[str, int]  # of each op
    storage: Storage
    recompute: tuple[tuple[str, int], ...]  # (module, stage)


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptLayers:
    """What became of the layers of a list."""

    path: str  # of the list: "model.layers"
    kept: tuple[int, ...]  # their numbers before
    total: int

    def __str__(self) -> str:
        return f"{self.path or 'the model'}: {', '.join(map(str, self.kept))} of {self.total}"


def drop_layers(decided: Decided) -> tuple[Decided, tuple[KeptLayers, ...], Callable[[str], str]]:
    """The graph with a few layers of each kind, what was kept, and the new name of a module's path.

    Lists inside of layers are looked at once the outer ones are short.
    """
    notes: list[KeptLayers] = []
    renames: list[Callable[[str], str]] = []
    depth = 1
    while lists := _lists(decided.graph, depth):
        for parent in lists:
            found = _short(decided, parent)
            if found is not None:
                decided, kept, rename = found
                notes.append(kept)
                renames.append(rename)
        depth += 1

    def renamed(path: str) -> str:
        for rename in renames:
            path = rename(path)
        return path

    return decided, tuple(notes), renamed


def _lists(graph: Graph, depth: int) -> tuple[str, ...]:
    """The paths of lists of modules that are inside of `depth - 1` other lists."""
    found: dict[str, None] = {}
    for op in graph.ops:
        for path in prefixes(op.module_path):
            parts = path.split(".")
            if parts[-1].isdigit() and sum(part.isdigit() for part in parts) == depth:
                found.setdefault(".".join(parts[:-1]))
    return tuple(found)


def _short(decided: Decided, parent: str) -> tuple[Decided, KeptLayers, Callable[[str], str]] | None:
    """A graph with fewer layers of one list, or None if none can go."""
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
        for one, like in zip(layers[number], layers[other], strict=True):
            gone.add(one.name)
            values.update(zip(one.outputs, like.outputs, strict=True))
    kept = tuple(number for number in sorted(layers) if number not in stands_for)
    rename = partial(_renumbered, parent, _numbers(graph, parent, set(stands_for)))
    note = KeptLayers(path=parent, kept=kept, total=len(layers))

    def lost(path: str) -> bool:
        return _number(path, parent) in stands_for

    return _without(decided, gone, values, lost, rename), note, rename


def _number(path: str, parent: str) -> int | None:
    """The number of the layer of a list that a path is in."""
    lead = f"{parent}." if parent else ""
    head = path[len(lead) :].split(".", 1)[0] if path.startswith(lead) else ""
    return int(head) if head.isdigit() else None


def _numbers(graph: Graph, parent: str, gone: set[int]) -> dict[int, int]:
    """New numbers, one after the other, for what is left of a list, also for what has parameters only."""
    keys = (key for held in graph.parameters for key in held.keys)
    paths = (*(op.module_path for op in graph.ops), *keys, *(held.key for held in graph.buffers))
    there = sorted({number for path in paths if (number := _number(path, parent)) is not None} - gone)
    return {number: at for at, number in enumerate(there)}


def _renumbered(parent: str, numbers: Mapping[int, int], path: str) -> str:
    """A path, a key or the name of an op, with the layer's new number."""
    lead = f"{parent}." if parent else ""
    found = re.match(r"\d+(?![^./@ ])", path[len(lead) :]) if path.startswith(lead) else None
    if found is None or int(found[0]) not in numbers:
        return path
    return f"{lead}{numbers[int(found[0])]}{path[len(lead) + found.end() :]}"


def _kind(decided: Decided, parent: str, number: int, ops: Sequence[Op]) -> Any:
    """What two layers have in common if one may stand for the other."""
    graph, path = decided.graph, f"{parent}.{number}".lstrip(".")
    inside = {op.name for op in ops}
    reach = partial(_relative, path)
    made = {name: at for at, name in enumerate(name for op in ops for name in op.outputs)}
    owned: dict[str, Parameter | Buffer] = {held.value: held for held in graph.parameters}
    owned |= {held.value: held for held in graph.buffers}
    outside: dict[str, int] = {}
    regions: dict[str, int] = {}
    shared = {op.region for op in graph.ops if op.name not in inside}

    def given(name: str) -> Any:
        value = graph.values[name]
        where: Any = made.get(name)
        if where is None and name in owned:
            where = _owned(owned[name], reach, decided.storage)
        elif where is None:
            where = ("outside", outside.setdefault(name, len(outside)))
        return where, value.shape, value.dtype, value.gradient

    def region(op: Op) -> Any:
        if op.region is None or op.region in shared:
            return op.region
        return regions.setdefault(op.region, len(regions))

    said = tuple(
        (
            reach(op.name), op.target, _plain(op.arguments, reach), tuple(map(given, op.inputs)),
            tuple(given(name) for name in op.outputs), region(op), op.autocast, op.no_grad, decided.stage[op.name],
            tuple(sorted(decided.choices.get(op.name, {}).items())),
        )
        for op in ops
    )  # fmt: skip
    again = tuple(sorted((reach(at), stage) for at, stage in decided.recompute if is_inside(at, path)))
    foreign = {held.update for held in graph.buffers if held.value and not is_inside(held.key, path)}
    odd = any(name in foreign for op in ops for name in op.outputs) or _lends(graph, path, inside)
    return said, again, number if odd else None


def _lends(graph: Graph, path: str, inside: set[str]) -> bool:
    """Whether ops outside of a layer read a parameter or a buffer of its own."""
    own = [held.value for held in graph.parameters if all(is_inside(key, path) for key in held.keys)]
    own += [held.value for held in graph.buffers if is_inside(held.key, path)]
    return any(op.name not in inside for name in own for op, _ in graph.users[name])


def _owned(held: Parameter | Buffer, reach: Callable[[str], str], storage: Storage) -> Any:
    if isinstance(held, Buffer):
        return "buffer", reach(held.key), held.persistent, held.update is not None
    keys = tuple(map(reach, held.keys))
    return "parameter", keys, held.trainable, tuple(dict.fromkeys(storage.get(key, ()) for key in held.keys))


def _relative(path: str, name: str) -> str:
    found = re.match(rf"{re.escape(path)}(?=[./@ ]|$)", name)
    return "~" + name[found.end() :] if found else name


def _plain(held: Any, reach: Callable[[str], str]) -> Any:
    """Arguments as something that compares, with the layer's own path left out."""
    if isinstance(held, tuple):
        return tuple(_plain(inner, reach) for inner in held)
    return (type(held).__name__, reach(held)) if isinstance(held, str) else (type(held).__name__, repr(held))


def _without(
    decided: Decided,
    gone: set[str],
    values: Mapping[str, str],
    lost: Callable[[str], bool],
    rename: Callable[[str], str],
) -> Decided:
    """What is left without some ops, whose values are replaced, and without what is in modules that are lost."""
    graph = decided.graph
    left = tuple(op for op in graph.ops if op.name not in gone)
    ops = tuple(_replaced(op, values, rename) for op in left)
    outputs = tuple(replace(held, value=values.get(held.value or "", held.value)) for held in graph.outputs)
    parameters = tuple(
        replace(held, keys=tuple(rename(key) for key in held.keys if not lost(key)))
        for held in graph.parameters
        if not all(map(lost, held.keys))
    )
    made = {name for op in ops for name in op.outputs}
    buffers = tuple(replace(held, key=rename(held.key)) for held in graph.buffers if not lost(held.key))
    there = made | {held.value for held in graph.inputs}
    there |= {held.value for held in parameters} | {held.value for held in buffers}
    small = replace(
        graph, ops=ops, outputs=outputs, parameters=parameters, buffers=buffers, given=None,
        values={name: value for name, value in graph.values.items() if name in there},
    )  # fmt: skip
    again = dict.fromkeys((rename(path), stage) for path, stage in decided.recompute if not lost(path))
    return Decided(
        graph=small,
        choices={rename(op.name): decided.choices.get(op.name, {}) for op in left},
        stage={rename(op.name): decided.stage[op.name] for op in left},
        storage={rename(key): held for key, held in decided.storage.items() if not lost(key)},
        recompute=tuple((path, stage) for path, stage in again if path in small.under),
    )


def _replaced(op: Op, values: Mapping[str, str], rename: Callable[[str], str]) -> Op:
    key = op.argument("op_key")
    op = op if key is None else op.with_arguments(op_key=rename(key))
    inputs = tuple(values.get(name, name) for name in op.inputs)
    return replace(op, name=rename(op.name), module_path=rename(op.module_path), inputs=inputs)

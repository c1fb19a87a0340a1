"""Layers whose text is the same become one method and a loop; recompute regions become methods.

    Item   = Op | Invoke(method, ...) | Loop(method, ...)
    Method = a run of items with the values that go in and out

A run of ops belongs to a layer by the first number in its module path ("blocks.3.attn").
Two runs are alike if they do the same, on values and parameters that stand in the same
places. What a run gets from the run before it is carried, what all runs share is passed,
what only the outside reads is collected in a list.

A region that is a whole layer is the layer's method, called through `runtime.recompute`; layers of the
same text that are not recomputed call it as it is. A region that spans several layers is a method with
their loop in it. Other regions are methods that the layer's method calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from ..ir import Op
from ..ir.paths import numbered_layer
from ..ir.recompute import region_path
from ..lower import LoweredProgram, Size
from ..rules import is_random
from .sizes import SizeNames
from .updates import place_updates

RESERVED = frozenset(
    "fixed module random device updates zero open close gathered update place sizes constants renew forward opaque "
    "experts parts at_key start region mb known weights counts prologue batch_norm".split()
)
"""What a program has of its own; a model with a part of such a name is reached through `self.module`."""


@dataclass(frozen=True, eq=False)
class Method:
    """A method of the generated class. `lead` is the layer that its text is written for."""

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    items: tuple[Item, ...]
    lead: str | None = None


@dataclass(frozen=True, eq=False)
class Invoke:
    """A call of a method, for the layer `at` if the method is a layer's."""

    method: Method
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    at: str | None = None
    recompute: bool = True


@dataclass(frozen=True, eq=False)
class LayerLoop:
    """A method called for layers `first` to `last` of a list."""

    method: Method
    path: str
    first: int
    last: int
    total: int
    inputs: tuple[str, ...]  # of the first call
    carried: tuple[tuple[int, int], ...]  # (input, output) of the method
    finals: tuple[tuple[int, str], ...]  # (output, value) that is read after the loop
    results: tuple[str, ...]  # what the last call returns
    collected: tuple[tuple[int, tuple[str, ...]], ...] = ()  # (output, the value of each layer)
    recompute: bool = False

    @property
    def outputs(self) -> tuple[str, ...]:
        return (*(name for _, name in self.finals), *(name for _, names in self.collected for name in names))


Item = Op | Invoke | LayerLoop


@dataclass
class _Run:
    path: str
    index: int
    ops: list[Op]
    externals: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    key: Any = None
    numbers: range = range(0)
    wide: str | None = None  # the region that it is a part of, with other runs

    @property
    def whole(self) -> str | None:
        """The region that all of it is in, and nothing else."""
        regions = {op.region for op in self.ops}
        return None if self.wide or len(regions) > 1 else self.ops[0].region

    @property
    def lead(self) -> str:
        return f"{self.path}.{self.index}" if self.path else str(self.index)


class Folder:
    """Finds the loops of a program."""

    def __init__(self, program: LoweredProgram, sizes: SizeNames) -> None:
        self.program, self.sizes = program, sizes
        self.keys = {spec.value: spec.name for spec in program.parameters}
        self.keys |= {buffer.value: buffer.key for buffer in program.graph.buffers}
        self.stored = set(self.keys) | {name for op in program.constants for name in op.outputs}
        self.readers: dict[str, list[int]] = {}
        for number, op in enumerate(program.body):
            for name in op.inputs:
                self.readers.setdefault(name, []).append(number)
        self.updates, self.late = place_updates(program)
        self.needed = {name for name in program.outputs if name is not None} | {name for _, name in self.late}
        self.maker: dict[str, range] = {}  # the numbers of the ops of the run that makes a value
        self.methods: list[Method] = []
        self.layers: dict[Any, Method] = {}  # by what a layer does and gives
        self.tops = {*RESERVED, *program.mesh.names, *(key.split(".")[0] for key in self.keys.values())}
        self.names = {*self.tops, *program.graph.branches}
        self.totals: dict[str, int] = {}
        for op in program.body:
            layer = numbered_layer(op.module_path)
            if layer:
                self.totals[layer[0]] = max(self.totals.get(layer[0], 0), layer[1] + 1)

    def fold(self) -> tuple[Item, ...]:
        """The items of `forward`; the methods they call are in `self.methods`, in order."""
        items: list[Item] = []
        for wide, runs in groupby(self._runs(), key=lambda run: run.wide):
            listed = list(runs)
            folded = self._fold(listed)
            items += folded if wide is None else [self._region([op for run in listed for op in run.ops], None, folded)]
        return tuple(items)

    def _fold(self, runs: list[_Run]) -> list[Item]:
        items: list[Item] = []
        at = 0
        while at < len(runs):
            run = runs[at]
            group = [run]
            while at + len(group) < len(runs) and self._follows(group[-1], runs[at + len(group)]):
                group.append(runs[at + len(group)])
            loop = self._loop(group) if len(group) > 1 else None
            while loop is None and len(group) > 2:
                group.pop()
                loop = self._loop(group)
            if loop is None:
                items += self._single(run)
                at += 1
            else:
                items.append(loop)
                at += len(group)
        return items

    def _single(self, run: _Run) -> list[Item]:
        """A run that no loop takes in: by the method of layers like it, if there is one, else written out."""
        if run.index < 0:
            return list(run.ops) if run.wide else self._regions(run.ops, None)
        produced = self._produced(run)
        returned = tuple(at for at, name in enumerate(produced) if name in run.outputs)
        if (self._plain(run), returned) in self.layers or run.whole:
            method = self._method(run, returned)
            outputs = tuple(produced[at] for at in returned)
            return [Invoke(method, tuple(run.externals), outputs, run.lead, run.whole is not None)]
        return list(run.ops) if run.wide else self._regions(run.ops, run.lead)

    def _runs(self) -> list[_Run]:
        runs: list[_Run] = []
        wide = self._wide()
        for op in self.program.body:
            path, index = numbered_layer(op.module_path) or ("", -1)
            region = op.region if op.region in wide else None
            if not runs or (runs[-1].path, runs[-1].index, runs[-1].wide) != (path, index, region):
                runs.append(_Run(path, index, [], wide=region))
            runs[-1].ops.append(op)
        number = 0
        for run in runs:
            run.numbers = range(number, number + len(run.ops))
            self.maker.update(dict.fromkeys(self._produced(run), run.numbers))
            self._describe(run, number)
            number += len(run.ops)
        return runs

    def _wide(self) -> set[str]:
        """The regions that span several layers, or a layer and something else."""
        numbers: dict[str, set[tuple[str, int] | None]] = {}
        for op in self.program.body:
            if op.region is not None:
                numbers.setdefault(op.region, set()).add(numbered_layer(op.module_path))
        return {region for region, layers in numbers.items() if len(layers) > 1}

    def _describe(self, run: _Run, start: int) -> None:
        if run.index < 0:
            return
        inside: dict[str, tuple[int, int]] = {}
        key: list[Any] = []
        regions: dict[str | None, int] = {}
        lead = f"{run.lead}."
        for number, op in enumerate(run.ops):
            refs: list[Any] = []
            for name in op.inputs:
                if name in inside:
                    refs.append(inside[name])
                elif name in self.keys and self.keys[name].startswith(run.lead + "."):
                    refs.append(("at", self.keys[name][len(run.lead) :]))
                elif name in self.stored:
                    refs.append(("stored", name))
                else:
                    if name not in run.externals:
                        run.externals.append(name)
                    refs.append(("in", run.externals.index(name)))
            arguments = tuple((k, self._argument(k, v, run)) for k, v in op.arguments)
            shapes = tuple(
                (self.program.values[name].shape, self.program.values[name].dtype, self.program.layouts[name])
                for name in op.outputs
            )
            region = regions.setdefault(op.region, len(regions)) if op.region and not run.wide else None
            drawn = op.name.removeprefix(run.lead) if is_random(op) else None
            updates = tuple(k.removeprefix(lead) for name in op.outputs for k in self.updates.get(name, ()))
            key.append((op.target, arguments, tuple(refs), shapes, op.no_grad, op.autocast, drawn, updates, region))
            for index, name in enumerate(op.outputs):
                inside[name] = (number, index)
        end = start + len(run.ops)
        for name in inside:
            if name in self.needed or any(not start <= reader < end for reader in self.readers.get(name, ())):
                run.outputs.append(name)
        run.key = tuple(key)

    def _argument(self, name: str, value: Any, run: _Run) -> Any:
        if name == "op_key" and isinstance(value, str):
            return value.removeprefix(run.lead)
        if isinstance(value, Size):
            return self.sizes.text(value)
        if isinstance(value, tuple):
            return tuple(self._argument("", item, run) for item in value)
        if isinstance(value, dict):
            return tuple((key, self._argument("", item, run)) for key, item in value.items())
        return value

    def _follows(self, a: _Run, b: _Run) -> bool:
        return a.path == b.path and a.index >= 0 and b.index == a.index + 1 and a.key == b.key

    def _loop(self, runs: list[_Run]) -> LayerLoop | None:
        first, last = runs[0], runs[-1]
        places = [{name: at for at, name in enumerate(self._produced(run))} for run in runs]
        used = sorted({place[name] for run, place in zip(runs, places, strict=True) for name in run.outputs})
        produced = [self._produced(run) for run in runs]
        carried: list[tuple[int, int]] = []
        for at in range(len(first.externals)):
            column = [run.externals[at] for run in runs]
            if len(set(column)) == 1:
                continue
            froms = {places[i].get(column[i + 1]) for i in range(len(runs) - 1)}
            if (
                len(froms) != 1
                or None in froms
                or any(column[i + 1] not in runs[i].outputs for i in range(len(runs) - 1))
            ):
                return None
            (place,) = froms
            assert place is not None
            carried.append((at, place))
        finals: list[tuple[int, str]] = []
        collected: list[tuple[int, tuple[str, ...]]] = []
        moved = {place for _, place in carried}
        for place in used:
            column = [names[place] for names in produced]
            outside = [
                self._read_outside(name, runs[i + 1] if i + 1 < len(runs) else None) for i, name in enumerate(column)
            ]
            if any(outside[:-1]):
                collected.append((place, tuple(column)))
            elif outside[-1]:
                finals.append((place, column[-1]))
        returned = sorted({*moved, *(place for place, _ in finals), *(place for place, _ in collected)})
        rank = {place: at for at, place in enumerate(returned)}
        method = self._method(first, tuple(returned))
        return LayerLoop(
            method=method,
            path=first.path,
            first=first.index,
            last=last.index,
            total=self.totals[first.path],
            inputs=tuple(first.externals),
            carried=tuple((at, rank[place]) for at, place in carried),
            finals=tuple((rank[place], name) for place, name in finals),
            results=tuple(produced[-1][place] for place in returned),
            collected=tuple((rank[place], names) for place, names in collected),
            recompute=first.whole is not None,
        )

    def _produced(self, run: _Run) -> list[str]:
        return [name for op in run.ops for name in op.outputs]

    def _read_outside(self, name: str, following: _Run | None) -> bool:
        """Whether something other than the next run reads a value."""
        if name in self.needed:
            return True
        producer = self.maker[name]
        for reader in self.readers.get(name, ()):
            if reader in producer or (following is not None and reader in following.numbers):
                continue
            return True
        return False

    def _plain(self, run: _Run) -> Any:
        """What a run does, whether it is recomputed as a whole or not."""
        return run.path, tuple((*step[:-1], None) for step in run.key) if run.whole else run.key

    def _method(self, run: _Run, returned: tuple[int, ...]) -> Method:
        """The method of a layer that returns its values at some places; layers that do the same share it."""
        key = (self._plain(run), returned)
        if key not in self.layers:
            produced = self._produced(run)
            items = run.ops if run.whole or run.wide else self._regions(run.ops, run.lead)
            self.layers[key] = Method(
                name=self._free(_singular(run.path)),
                inputs=tuple(run.externals),
                outputs=tuple(produced[place] for place in returned),
                items=tuple(items),
                lead=run.lead,
            )
            self.methods.append(self.layers[key])
        return self.layers[key]

    def _free(self, preferred: str) -> str:
        name, number = preferred, 2
        while name in self.names:
            name, number = f"{preferred}_{number}", number + 1
        self.names.add(name)
        return name

    def _regions(self, ops: Iterable[Op], lead: str | None) -> list[Item]:
        """Runs of ops that are recomputed become methods of their own."""
        items: list[Item] = []
        for region, group in groupby(ops, key=lambda op: op.region):
            run = list(group)
            items += run if region is None else [self._region(run, lead, run)]
        return items

    def _region(self, ops: Sequence[Op], lead: str | None, items: Sequence[Item]) -> Invoke:
        inside = {name for op in ops for name in op.outputs}
        inputs = dict.fromkeys(n for op in ops for n in op.inputs if n not in inside and n not in self.stored)
        own = {op.name for op in ops}
        outputs = [
            name
            for op in ops
            for name in op.outputs
            if name in self.needed or any(self.program.body[r].name not in own for r in self.readers.get(name, ()))
        ]
        path = region_path(ops[0].region or "")
        word = "" if path is None else _word(path)
        method = Method(
            name=self._free(word if word and word not in self.tops else f"recomputed_{word}".rstrip("_")),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            items=tuple(items),
            lead=lead,
        )
        self.methods.append(method)
        return Invoke(method, tuple(inputs), tuple(outputs), lead)


def _singular(path: str) -> str:
    """What one of a list is called: "block" of "model.blocks"."""
    word = path.rsplit(".", 1)[-1] or "layer"
    return word[:-1] if word.endswith("s") and len(word) > 2 else f"{word}_layer"


def _word(path: str) -> str:
    """What the method of a module is called."""
    outer, _, word = path.rpartition(".")
    if word.isdigit():
        return _singular(outer)
    return word if word.isidentifier() else ""

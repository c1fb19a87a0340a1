"""The generated file: head, sizes, parameters, and a class whose methods are the model's layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..layout import MB, REPLICATE, Mesh
from ..lower import LoweredProgram
from ..ops.contexts import GROUP_ARGUMENTS
from .body import BodyWriter
from .branches import branch_method
from .calls import function_name, is_user_function
from .comments import shape_of
from .grouping import Grouping
from .layers import Folder, Item, Method
from .lines import narrowed
from .names import RESERVED, Names, preferred_name
from .parameters import bytes_per_rank, parameter_table, unit_ranges
from .prologue import counts, known_names
from .sizes import SizeNames
from .validate import validate


@dataclass(frozen=True, slots=True, kw_only=True)
class Emitted:
    """A generated file, before it is written."""

    name: str
    text: str
    class_name: str
    inputs: tuple[str, ...]


def emit(program: LoweredProgram) -> Emitted:
    """The text of the program; the same for every rank."""
    writer = FileWriter(program)
    text = "\n".join(line for long in writer.file() for line in narrowed(long)) + "\n"
    validate(program, text)
    return Emitted(name=f"{program.graph.entry}.py", text=text, class_name=writer.class_name, inputs=writer.inputs)


class FileWriter:
    """Writes one file."""

    def __init__(self, program: LoweredProgram) -> None:
        self.program = program
        self.class_name = _class_name(program.graph.name)
        called = {op.target for op in program.body if is_user_function(op)}
        self.functions = {function_name(path): path for path in sorted(name.removeprefix("call.") for name in called)}
        self.sizes = SizeNames(program, {self.class_name, *self.functions}, RESERVED | _words(program))
        self.parts = program.mesh.sizes
        self.inputs = tuple(f"in_{at}" for at in range(len(program.graph.inputs)))
        self.folder = Folder(program, self.sizes)
        self.grouping = Grouping(program, self.folder.updates, self.sizes)
        self.writer = BodyWriter(program, self.sizes, self.folder.updates)

    def file(self) -> Iterator[str]:
        """All lines; the head comes last to be written, since it defines and imports what the others use."""
        items = self.folder.fold()
        for op in self.program.body:  # name sizes in the order in which a reader meets them
            for name in op.outputs[:1]:
                shape_of(name, self.program, self.sizes)
        methods = [list(self.constants()), list(self.prologue())]
        forward = list(self.forward(items))
        methods += [list(self.method(method)) for method in self.folder.methods]
        branches = self.program.graph.branches.values()
        methods += [
            list(branch_method(branch, self.sizes, lambda op: self.writer.context(op, None))) for branch in branches
        ]
        table = list(parameter_table(self.program, self.class_name, self.sizes))
        methods = [list(self.attributes()), *methods, forward]
        rest = [*table, *self.units(), "", "", f"class {self.class_name}(Program):"]
        for lines in methods:
            rest += [*lines, ""] if lines else []
        yield from self.head("\n".join(rest))
        yield from rest[:-1]

    def attributes(self) -> Iterator[str]:
        """What the class has beside the methods of the model."""
        ragged = list(self.sizes.ragged_definitions())
        if self.program.early:
            yield f"    counts = {_tuple(list(counts(self.program)))}"
        if self.program.early and ragged:
            yield ""
        if ragged:
            yield "    def sizes(self):  # that differ between ranks"
            yield from (f"        self.{name} = {text}" for name, text in ragged)

    def units(self) -> Iterator[str]:
        """The layers that ZeRO-3 gathers."""
        if self.writer.unit_of:
            units = ", ".join(unit_ranges(self.writer.units_in_order()))
            yield f"UNITS = [{units}]  # in the order in which they are gathered"

    def head(self, text: str) -> Iterator[str]:
        """All that stands above the table of parameters; `text` is what comes below."""
        program, graph = self.program, self.program.graph
        stored = sum(bytes_per_rank(spec, self.parts) for spec in program.parameters)
        kind = {"train": "training"}.get(graph.entry, graph.entry)
        title = f", {program.title}" if program.title else ""
        yield f'"""{graph.name}, {kind}{title}. Generated from plan {program.plan_name}: edit the plan, not this file.'
        yield ""
        axes = tuple(axis for axis in program.mesh.axes if axis.name != MB)
        yield f"mesh       {Mesh(axes=axes)}"
        if MB in self.parts:
            yield f"time       {self.parts[MB]} microbatches; {MB} is the one that runs"
        yield f"plan       {program.plan_policy}"
        yield from program.header
        yield f"stores     {stored / 2**20:.1f} MiB of parameters per rank"
        yield '"""'
        yield ""
        yield from self.imports(text)
        yield ""
        yield f"MESH = {{{', '.join(f'{a.name!r}: {a.size}' for a in axes)}}}".replace("'", '"')
        yield f"GROUPS = [{', '.join(repr('_'.join(axes)) for axes in self.groups())}]".replace("'", '"')
        yield ""
        definitions = list(self.sizes.definitions())
        if definitions:
            yield "# Sizes: a capital letter is global, a small one (or one with an axis) is this rank's share."
            yield from definitions
            yield ""

    def imports(self, text: str) -> Iterator[str]:
        """What the file needs, and the user's functions."""
        yield from ["import torch"] if re.search(r"\btorch\.", text) else []
        yield from ["import torch.nn.functional as F"] if re.search(r"\bF\.", text) else []
        yield ""
        yield from ["from shardwright import runtime"] if self.functions or re.search(r"\bruntime\.", text) else []
        used = {
            "R": r"(dst|src)=R\b", "comm": r"\bcomm\.", "local_size": r"\blocal_size\(", "shard": r"(?<![\w.])shard\(",
        }  # fmt: skip
        names = [name for name, mark in used.items() if re.search(mark, text)]
        yield f"from shardwright.runtime import {', '.join(sorted(['ParameterEntry', 'Program', *names]))}"
        yield from (f'{name} = runtime.find("{path}")' for name, path in self.functions.items())

    def groups(self) -> list[tuple[str, ...]]:
        """The sets of axes that the program communicates over."""
        groups: set[tuple[str, ...]] = {(axis.name,) for axis in self.program.mesh.axes}
        groups |= {early.axes for early in self.program.early if early.axes}
        for op in self.program.ops:
            for key in GROUP_ARGUMENTS:
                axes = op.argument(key)
                if isinstance(axes, tuple) and axes:
                    groups.add(axes)
        for spec in self.program.parameters:
            sums = tuple(name for name in self.program.mesh.names if spec.layout.placement(name) == REPLICATE)
            if sums:
                groups.add(sums)
        return sorted(axes for axes in groups if MB not in axes)

    def constants(self) -> Iterator[str]:
        """Constants are computed when the file is loaded; those that the body reads become attributes."""
        program = self.program
        if not program.constants:
            return
        read = {name for op in program.body for name in op.inputs} | program.needed()
        outputs = [name for op in program.constants for name in op.outputs if name in read]
        words: dict[str, str] = {}
        for name in outputs:
            word, number = preferred_name(name), 1
            while word in words:
                word, number = f"{preferred_name(name)}_{number}", number + 1
            words[word] = name
        self.writer.fixed |= {name: f"self.fixed.{word}" for word, name in words.items()}
        lines = self.grouping.lines([replace(op, no_grad=False, region=None) for op in program.constants], outputs)
        yield "    def constants(self):  # what depends on no input and no parameter, computed once"
        yield from self.writer.body(lines, Names(lines, (), self.sizes.taken), None)

    def prologue(self) -> Iterator[str]:
        """What all microbatches need is computed for each before the first; forward finds it in `known`."""
        program = self.program
        if not program.early:
            return
        sources = [early.source for early in program.early]
        lines = self.grouping.lines(program.prologue, sources)
        names = Names(lines, sources, self.sizes.taken)
        words = names.bind_all(item.value for item in program.prologue_inputs)
        self.writer.fixed |= known_names(program)
        yield f"    def prologue({', '.join(['self', *words])}):  # for each microbatch, before the first"
        yield from self.writer.body(lines, names, None)
        yield f"        return {_tuple([self.writer.ref(source, names, None) for source in sources])}"

    def forward(self, items: Sequence[Item]) -> Iterator[str]:
        program, graph = self.program, self.program.graph
        late = self.folder.late
        outputs = [name for name in (*program.outputs, *(name for _, name in late)) if name is not None]
        lines = self.grouping.lines(items, outputs)
        names = Names(lines, outputs, self.sizes.taken, self.folder.updates)
        words = names.bind_all(item.value for item in graph.inputs)
        self.inputs = tuple(words)
        yield f"    def forward(self{''.join(', ' + word for word in words)}):{self.input_shapes(words)}"
        yield from self.writer.body(lines, names, None)
        for key, name in late:
            yield f'        self.update("{key}", {self.writer.ref(name, names, None)})'
        shown = [self.writer.ref(name, names, None) for name in program.outputs if name is not None]
        yield f"        return {_tuple(shown)}"

    def input_shapes(self, words: Sequence[str]) -> str:
        """The inputs with their shapes, by where the caller passes them if that is not a name."""
        shapes = [
            f"{word if item.path.isidentifier() else item.path} {shape_of(item.value, self.program, self.sizes)}"
            for word, item in zip(words, self.program.graph.inputs, strict=True)
        ]
        return f"  # {', '.join(shapes)}" if shapes else ""

    def method(self, method: Method) -> Iterator[str]:
        lines = self.grouping.lines(method.items, method.outputs)
        names = Names(lines, method.outputs, self.sizes.taken, self.folder.updates)
        words = names.bind_all(method.inputs)
        at = ", at" if method.lead is not None else ""
        shapes = [shape_of(name, self.program, self.sizes) for name in method.inputs]
        signature = ", ".join(f"{word} {shape}" for word, shape in zip(words, shapes, strict=True))
        yield f"    def {method.name}(self{at}{''.join(', ' + word for word in words)}):" + (
            f"  # {signature}" if signature else ""
        )
        yield from self.writer.body(lines, names, method.lead)
        yield f"        return {', '.join(names.words[name] for name in method.outputs)}"


def _class_name(name: str) -> str:
    """The name of the class: that of the user's, unless the file needs it for something else."""
    word = re.sub(r"\W", "", name)
    return word if word.isidentifier() and word not in RESERVED else f"{word}Model"


def _tuple(texts: Sequence[str]) -> str:
    return f"({', '.join(texts)}{',' if len(texts) == 1 else ''})"


def _words(program: LoweredProgram) -> set[str]:
    """The names that the values of a program would like to have; sizes get others."""
    graphs = (program.graph, *program.graph.branches.values())
    values = {name for op in program.ops for name in op.outputs} | {name for graph in graphs for name in graph.values}
    return {preferred_name(name) for name in values}

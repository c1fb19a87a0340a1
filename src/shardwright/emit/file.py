"""The generated file: head, sizes, pieces, and a class whose methods are the model's layers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ..ir import Op
from ..layout import MB, REPLICATE, Mesh
from ..lower import LoweredProgram
from ..ops.user_calls import OPAQUE
from ..rules import is_random
from .branches import branch_method
from .calls import call_text, function_name, is_user_function, returns_list
from .comments import comment_on, shape_of
from .layers import RESERVED, Folder, Invoke, Item, LayerLoop, Method
from .lines import narrowed
from .names import RESERVED as RESERVED_WORDS
from .names import Names, preferred_name
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
        self.sizes = SizeNames(program, [self.class_name, *self.functions])
        self.parts = program.mesh.sizes
        self.paths: dict[str, str] = {spec.value: spec.name for spec in program.parameters}
        self.paths |= {buffer.value: buffer.key for buffer in program.graph.buffers}
        self.parameters = {spec.value: spec for spec in program.parameters}
        self.fixed: dict[str, str] = {}  # constants: value -> attribute
        self.inputs = tuple(f"in_{at}" for at in range(len(program.graph.inputs)))
        self.gathers = any(spec.storage.shards_parameter for spec in program.parameters)
        self.units: dict[str, None] = {}
        tops = {key.split(".")[0] for key in self.paths.values()}
        own = {*RESERVED, *program.mesh.names, *program.graph.branches}
        self.root = "self.held" if tops & own or any(top.isdigit() for top in tops) else "self"

    def file(self) -> Iterator[str]:
        folder = Folder(self.program, self.sizes)
        items = folder.fold()
        for op in self.program.body:  # name sizes in the order in which a reader meets them
            for name in op.outputs[:1]:
                shape_of(name, self.program, self.sizes)
        constants = list(self.constants())
        prologue = list(self.prologue())
        forward = list(self.forward(items))
        methods = [list(self.method(method)) for method in folder.methods]
        branches = self.program.graph.branches.values()
        methods += [list(branch_method(branch, self.sizes, lambda op: self.context(op, None))) for branch in branches]
        table = list(parameter_table(self.program, self.class_name))
        ragged = list(self.sizes.ragged_definitions())
        text = "\n".join([*constants, *prologue, *forward, *(line for lines in methods for line in lines), *table])
        used = {
            "R": re.search(r"(dst|src)=R\b", text),
            "local_size": ragged,
            "shard": re.search(r"(?<![\w.])shard\(", text),
        }
        yield from self.head([name for name, is_used in used.items() if is_used])
        yield from table
        if self.gathers:
            yield f"UNITS = [{', '.join(unit_ranges(self.in_order()))}]  # in the order in which they are gathered"
        yield ""
        yield ""
        yield f"class {self.class_name}(Program):"
        if ragged:
            yield "    def sizes(self):  # that differ between ranks"
            yield from (f"        self.{name} = {text}" for name, text in ragged)
            yield ""
        if constants:
            yield from constants
            yield ""
        for lines in (prologue, *methods) if prologue else methods:
            yield from lines
            yield ""
        yield from forward

    def head(self, names: Sequence[str]) -> Iterator[str]:
        program, graph = self.program, self.program.graph
        stored = sum(bytes_per_rank(holding, self.parts) for holding in program.parameters)
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
        yield f"holds      {stored / 2**20:.1f} MiB of parameters a rank"
        yield '"""'
        yield ""
        yield "import torch"
        yield "import torch.nn.functional as F"
        yield ""
        yield "from shardwright import runtime"
        yield f"from shardwright.runtime import {', '.join(sorted(['ParameterEntry', 'Program', 'comm', *names]))}"
        yield from (f'{name} = runtime.find("{path}")' for name, path in self.functions.items())
        yield ""
        yield f"MESH = {{{', '.join(f'{a.name!r}: {a.size}' for a in axes)}}}".replace("'", '"')
        yield f"GROUPS = [{', '.join(repr('_'.join(axes)) for axes in self.groups())}]".replace("'", '"')
        yield ""
        definitions = list(self.sizes.definitions())
        if definitions:
            yield "# Sizes. Capital: whole; small: this rank's share."
            yield from definitions
            yield ""

    def groups(self) -> list[tuple[str, ...]]:
        """The sets of axes that the program talks over."""
        groups: set[tuple[str, ...]] = {(axis.name,) for axis in self.program.mesh.axes}
        groups |= {early.axes for early in self.program.early if early.axes}
        for op in self.program.ops:
            for key in ("axes", "rows", "classes"):
                axes = op.argument(key)
                if isinstance(axes, tuple) and axes:
                    groups.add(axes)
        for holding in self.program.parameters:
            sums = tuple(name for name in self.program.mesh.names if holding.layout.placement(name) == REPLICATE)
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
        names = Names(program.constants, outputs, self.sizes.used)
        lines = list(self.body([replace(op, no_grad=False) for op in program.constants], names, None))
        yield "    def constants(self):  # what depends on no input and no parameter, computed once"
        yield from lines
        used: set[str] = set()
        for name in outputs:
            word = names.words[name]
            while word in used or word in self.sizes.used or word in self.program.mesh.names:
                word += "_"
            used.add(word)
            self.fixed[name] = f"self.fixed.{word}"
            yield f"        self.fixed.{word} = {names.words[name]}"

    def prologue(self) -> Iterator[str]:
        """What all microbatches need is computed for each before the first; forward finds it in `known`."""
        program = self.program
        if not program.early:
            return
        names = Names(program.prologue, [early.source for early in program.early], self.sizes.used)
        words = names.bind_all(item.value for item in program.prologue_inputs)
        self.fixed |= known_names(program)
        yield f"    counts = ({', '.join(counts(program))},)"
        yield ""
        yield f"    def prologue({', '.join(['self', *words])}):  # for each microbatch, before the first"
        yield from self.body(program.prologue, names, None)
        yield f"        return ({', '.join(self.ref(early.source, names, None) for early in program.early)},)"

    def forward(self, items: Sequence[Item]) -> Iterator[str]:
        program, graph = self.program, self.program.graph
        outputs = [name for name in (*program.outputs, *(name for _, name in program.updates)) if name is not None]
        names = Names(items, outputs, self.sizes.used)
        words = names.bind_all(item.value for item in graph.inputs)
        self.inputs = tuple(words)
        yield f"    def forward(self{''.join(', ' + word for word in words)}):{self.said_inputs()}"
        yield from self.body(items, names, None)
        for key, name in program.updates:
            yield f'        self.update("{key}", {self.ref(name, names, None)})'
        shown = [self.ref(name, names, None) for name in program.outputs if name is not None]
        yield f"        return ({', '.join(shown)}{',' if len(shown) == 1 else ''})"

    def said_inputs(self) -> str:
        shapes = [f"{item.path} {shape_of(item.value, self.program, self.sizes)}" for item in self.program.graph.inputs]
        return f"  # {', '.join(shapes)}" if shapes else ""

    def method(self, method: Method) -> Iterator[str]:
        names = Names(method.items, method.outputs, self.sizes.used)
        words = names.bind_all(method.inputs)
        at = ", at" if method.lead is not None else ""
        shapes = [shape_of(name, self.program, self.sizes) for name in method.inputs]
        signature = ", ".join(f"{word} {shape}" for word, shape in zip(words, shapes, strict=True))
        yield f"    def {method.name}(self{at}{''.join(', ' + word for word in words)}):" + (
            f"  # {signature}" if signature else ""
        )
        yield from self.body(method.items, names, method.lead)
        yield f"        return {', '.join(names.words[name] for name in method.outputs)}"

    def body(self, items: Sequence[Item], names: Names, lead: str | None) -> Iterator[str]:
        opened: dict[str, int] = self.last_units(items) if self.gathers else {}
        is_open: set[str] = set()
        context, source = "", ""
        for at, item in enumerate(items):
            for unit in self.units_of(item):
                if unit in opened and unit not in is_open:
                    is_open.add(unit)
                    self.units.setdefault(unit)
                    context = ""  # the line stands outside of any `with`
                    yield f"        self.open({self.unit_text(unit, lead)})"
            if isinstance(item, Op):
                wanted = self.context(item, lead)
                if wanted and wanted != context:
                    yield f"        with {wanted}:"
                context = wanted
                where = str(item.source) if item.source else ""
                pad = "            " if wanted else "        "
                yield pad + self.line(item, names, at, lead, "" if where == source else where)
                source = where
            elif isinstance(item, Invoke):
                context, source = "", ""
                yield "        " + self.invoke(item, names, at, lead)
            else:
                context, source = "", ""
                yield from self.loop(item, names, at)
            for unit in [unit for unit, final in opened.items() if final == at and unit in is_open and unit]:
                context = ""
                yield f"        self.close({self.unit_text(unit, lead)})"

    def units_of(self, item: Item) -> list[str]:
        """The units that an op reads; methods open their own."""
        if not self.gathers or not isinstance(item, Op):
            return []
        parameters = [self.parameters[name] for name in item.inputs if name in self.parameters]
        return list(dict.fromkeys(spec.unit for spec in parameters if spec.storage.shards_parameter))

    def in_order(self) -> list[str]:
        """The units that methods open, in the order of their first use."""
        used = dict.fromkeys(unit for op in self.program.body for unit in self.units_of(op))
        return [unit for unit in used if unit in self.units]

    def last_units(self, items: Sequence[Item]) -> dict[str, int]:
        return {unit: at for at, item in enumerate(items) for unit in self.units_of(item)}

    def unit_text(self, unit: str, lead: str | None) -> str:
        return "at" if unit == lead else f'"{unit}"'

    def context(self, op: Op, lead: str | None) -> str:
        """What stands behind the `with` around a line; nothing for most."""
        contexts: list[str] = []
        if is_random(op):
            inside = lead is not None and op.name.startswith(lead)
            key = f'f"{{at}}{op.name[len(lead or "") :]}"' if inside else f'"{op.name}"'
            contexts.append(f"self.random.drawing({key})")
        if op.no_grad:
            contexts.append("torch.no_grad()")
        if op.autocast:
            contexts.append(f"torch.autocast(self.device.type, torch.{op.autocast.split(':')[1]})")
        return ", ".join(contexts)

    def line(self, op: Op, names: Names, at: int, lead: str | None, source: str = "") -> str:
        inputs = {index: self.ref(name, names, lead) for index, name in enumerate(op.inputs)}
        op = self.without_own(op) if op.target in (OPAQUE, "runtime.experts") else op
        text = call_text(self.relative(op, lead), inputs, self.sizes, self.parts)
        words: list[str] = []
        for name in op.outputs:
            words.append(names.bind(name, at, words) if name in names.last else "_")
        comment = comment_on(op, inputs, source, self.program, self.sizes)
        bound = f"({words[0]},)" if len(words) == 1 and returns_list(op) else ", ".join(words)
        return f"{bound} = {text}" + (f"  # {comment}" if comment else "")

    def without_own(self, op: Op) -> Op:
        """An opaque part finds the parameters and buffers that are in their places by itself."""
        lead = op.argument("op_key").split("@")[0]
        passed = [
            (name, slot)
            for name, slot in zip(op.argument("names"), op.argument("held"), strict=True)
            if self.paths.get(op.inputs[slot.index]) != (f"{lead}.{name}" if lead else name)
        ]
        return op.with_arguments(names=tuple(name for name, _ in passed), held=tuple(slot for _, slot in passed))

    def relative(self, op: Op, lead: str | None) -> Op:
        """In a layer's method the key of a random op is said relative to the layer."""
        key = op.argument("op_key")
        if lead is None or not isinstance(key, str) or not key.startswith(lead):
            return op
        return op.with_arguments(op_key=_Raw(f'f"{{at}}{key[len(lead) :]}"'))

    def ref(self, name: str, names: Names, lead: str | None) -> str:
        if name in self.fixed:
            return self.fixed[name]
        if name in self.paths:
            key = self.paths[name]
            if lead is not None and key.startswith(lead + "."):
                return "at" + _path(key[len(lead) + 1 :])
            return self.root + _path(key)
        return names.words[name]

    def invoke(self, item: Invoke, names: Names, at: int, lead: str | None) -> str:
        inputs = [self.ref(name, names, lead) for name in item.inputs]
        if item.at is not None:
            inputs = ["at" if item.at == lead else self.root + _path(item.at), *inputs]
            if self.gathers and lead is None:
                self.units.setdefault(item.at)
        words: list[str] = []
        for name in item.outputs:
            words.append(names.bind(name, at, words))
        return f"{', '.join(words)} = {_call(item.method, inputs, item.recompute)}"

    def loop(self, loop: LayerLoop, names: Names, at: int) -> Iterator[str]:
        carried = dict(loop.carried)
        words = [self.ref(name, names, None) for name in loop.inputs]
        reserved = [word for word in words if word.isidentifier()]  # every call of the loop reads them
        for place, name in enumerate(loop.inputs):
            if place in carried:
                value, before = loop.results[carried[place]], words[place]
                alive = names.last.get(name, -1) > at or not before.isidentifier()
                word = names.bind(value, at, reserved) if alive else before
                names.use(value, word)
                reserved.append(word)
                if word != before:
                    yield f"        {word} = {before}"
                words[place] = word
        results: list[str] = []
        by_output = {out: words[place] for place, out in loop.carried}
        lists = {place: self._list_name(loop, place, names) for place, _ in loop.collected}
        for word in lists.values():
            yield f"        {word} = []"
        for place, value in enumerate(loop.results):
            if place in by_output:
                results.append(by_output[place])
            else:
                results.append(names.bind(value, at, [*results, *reserved]))
        span = "" if (loop.first, loop.last + 1) == (0, loop.total) else f"[{loop.first}:{loop.last + 1}]"
        yield f"        for at in {self.root}{_path(loop.path)}{span}:"
        if self.gathers:
            for index in range(loop.first, loop.last + 1):
                self.units.setdefault(f"{loop.path}.{index}" if loop.path else str(index))
        yield f"            {', '.join(results)} = {_call(loop.method, ['at', *words], loop.recompute)}"
        for place, values in loop.collected:
            yield f"            {lists[place]}.append({results[place]})"
            for number, value in enumerate(values):
                names.words[value] = f"{lists[place]}[{number}]"

    def _list_name(self, loop: LayerLoop, place: int, names: Names) -> str:
        word = f"every_{preferred_name(loop.results[place])}"
        while word in names.bound or word in names.taken:
            word += "_"
        names.taken.add(word)
        return word


def _class_name(name: str) -> str:
    """The name of the class: that of the user's, unless the file needs it for something else."""
    word = re.sub(r"\W", "", name)
    return word if word.isidentifier() and word not in RESERVED_WORDS else f"{word}Model"


class _Raw(str):
    """Text that prints as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _call(method: Method, words: Sequence[str], recompute: bool) -> str:
    if recompute:
        return f"runtime.recompute({', '.join([f'self.{method.name}', *words])})"
    return f"self.{method.name}({', '.join(words)})"


def _path(key: str) -> str:
    """A state-dict key as attribute access."""
    text = ""
    for part in key.split("."):
        if not part:
            continue
        text += f"[{part}]" if part.isdigit() else f".{part}" if part.isidentifier() else f'["{part}"]'
    return text

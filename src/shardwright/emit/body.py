"""The lines of a method: ops with their comments, calls and loops, gathered layers, updates of buffers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from ..ir import Op
from ..lower import LoweredProgram
from ..ops.printing import axes_text
from ..ops.user_calls import OPAQUE
from ..rules import is_random
from .calls import call_text, returns_list
from .comments import comment_on
from .grouping import Line, OpLine, Updates
from .layers import RESERVED, Invoke, LayerLoop, Method
from .names import Names, preferred_name
from .sizes import SizeNames

INDENT = "    "


class BodyWriter:
    """Writes the bodies of methods. `lead` is the layer that a method is written for; its parts print as `at`."""

    def __init__(self, program: LoweredProgram, sizes: SizeNames, updates: Updates) -> None:
        self.program, self.sizes, self.updates = program, sizes, updates
        self.parts = program.mesh.sizes
        self.paths: dict[str, str] = {spec.value: spec.name for spec in program.parameters}
        self.paths |= {buffer.value: buffer.key for buffer in program.graph.buffers}
        gathered = [spec for spec in program.parameters if spec.storage.shards_parameter]
        self.unit_of = {spec.value: spec.unit for spec in gathered}  # of what ZeRO-3 gathers
        self.units: dict[str, None] = {}  # those that some method gathers
        self.fixed: dict[str, str] = {}  # what is no variable: value -> attribute
        tops = {key.split(".")[0] for key in self.paths.values()}
        own = {*RESERVED, *program.mesh.names, *program.graph.branches}
        self.root = "self.module" if tops & own or any(top.isdigit() for top in tops) else "self"

    def body(self, lines: Sequence[Line], names: Names, lead: str | None) -> Iterator[str]:
        last = {unit: at for at, line in enumerate(lines) for unit in self.units_of(line)}
        blocks: list[str] = []  # units of the `with` blocks that a line stands in
        opened: set[str] = set()
        context, source = "", ""
        for at, line in enumerate(lines):
            for unit in [unit for unit in self.units_of(line) if unit not in opened]:
                opened.add(unit)
                self.units.setdefault(unit)
                nests = bool(unit) and all(last[other] >= last[unit] for other in blocks)
                yield INDENT * (2 + len(blocks)) + gather_text(unit, lead, nests)
                blocks += [unit] if nests else []
                context = ""  # a unit is gathered outside of any other `with`
            pad = INDENT * (2 + len(blocks))
            if isinstance(line, OpLine):
                wanted = self.context(line.ops[-1], lead)
                if wanted and wanted != context:
                    yield f"{pad}with {wanted}:"
                context = wanted
                is_reshard = line.ops[-1].target.startswith("comm.")  # it is in no line of the user's
                where = "" if is_reshard else str(line.ops[-1].source or "")
                pad += INDENT if wanted else ""
                yield pad + self.line(line, names, at, lead, "" if where == source else where)
                yield from (pad + update for update in self.updated(line, names, lead))
                source = where or source
            else:
                context, source = "", ""
                yield from (pad + text for text in self.called(line, names, at, lead))
            for unit in [unit for unit, final in last.items() if final == at and unit]:
                context = ""
                if unit in blocks:
                    blocks.remove(unit)
                else:
                    yield f"{INDENT * (2 + len(blocks))}self.close({unit_text(unit, lead)})"

    def units_of(self, line: Line) -> list[str]:
        """The units that a line reads; methods gather their own."""
        if not isinstance(line, OpLine):
            return []
        return list(dict.fromkeys(self.unit_of[name] for name in line.inputs if name in self.unit_of))

    def units_in_order(self) -> list[str]:
        """The units that methods gather, in the order of their first use."""
        used = dict.fromkeys(
            self.unit_of[name] for op in self.program.body for name in op.inputs if name in self.unit_of
        )
        return [unit for unit in used if unit in self.units]

    def context(self, op: Op, lead: str | None) -> str:
        """What stands behind the `with` around a line; nothing for most."""
        contexts: list[str] = []
        if is_random(op):
            contexts.append(f"self.random.drawing({key_text(op.name, lead)})")
        if op.no_grad:
            contexts.append("torch.no_grad()")
        if op.autocast:
            contexts.append(f"torch.autocast(self.device.type, torch.{op.autocast.split(':')[1]})")
        return ", ".join(contexts)

    # -- lines

    def line(self, line: OpLine, names: Names, at: int, lead: str | None, source: str) -> str:
        op = line.ops[-1]
        inputs = {index: self.ref(name, names, lead) for index, name in enumerate(op.inputs) if name in line.inputs}
        text = self.batch_norm(line, inputs, lead) if line.module is not None else self.chain(line, names, lead)
        words: list[str] = []
        for name in line.outputs:
            read = name in names.last or name in self.fixed
            words.append(self.fixed.get(name) or names.bind(name, at, words) if read else "_")
        comment = comment_on(op, inputs, source, self.program, self.sizes)
        bound = f"({words[0]},)" if len(words) == 1 and returns_list(op) else ", ".join(words)
        return f"{bound} = {text}" + (f"  # {comment}" if comment else "")

    def chain(self, line: OpLine, names: Names, lead: str | None) -> str:
        """An op, behind the views that only it reads."""
        text = ""
        for number, op in enumerate(line.ops):
            inputs = {
                index: text if number and name in line.ops[number - 1].outputs else self.ref(name, names, lead)
                for index, name in enumerate(op.inputs)
            }
            op = self.without_own(op) if op.target in (OPAQUE, "runtime.experts") else op
            text = call_text(_relative(op, lead), inputs, self.sizes, self.parts)
        return text

    def batch_norm(self, line: OpLine, inputs: Mapping[int, str], lead: str | None) -> str:
        """A batch norm by its module."""
        norm = line.ops[-1]
        module = "at" if line.module == lead else self.path(str(line.module), lead)
        axes = norm.argument("axes")
        options = [f"{name}={norm.argument(name)!r}" for name in ("momentum", "eps")]
        options += [f"over={axes_text(axes)}"] if axes else []
        options += ["local=True"] if norm.argument("local", False) else []
        return f"self.batch_norm({', '.join([inputs[norm.argument('input').index], module, *options])})"

    def updated(self, line: OpLine, names: Names, lead: str | None) -> Iterator[str]:
        """Buffers and parameters get new values where these are made."""
        for name in line.outputs:
            for key in self.updates.get(name, ()):
                yield f"self.update({key_text(key, lead)}, {self.ref(name, names, lead)})"

    def without_own(self, op: Op) -> Op:
        """An opaque part finds the parameters and buffers that are in their places by itself."""
        lead = op.argument("op_key").split("@")[0]
        passed = [
            (name, slot)
            for name, slot in zip(op.argument("names"), op.argument("state"), strict=True)
            if self.paths.get(op.inputs[slot.index]) != (f"{lead}.{name}" if lead else name)
        ]
        return op.with_arguments(names=tuple(name for name, _ in passed), state=tuple(slot for _, slot in passed))

    def ref(self, name: str, names: Names, lead: str | None) -> str:
        """What a value is called."""
        if name in self.fixed:
            return self.fixed[name]
        return self.path(self.paths[name], lead) if name in self.paths else names.words[name]

    def path(self, key: str, lead: str | None) -> str:
        """A parameter, buffer or module by the user's names."""
        if lead is not None and key.startswith(lead + "."):
            return "at" + attributes(key[len(lead) + 1 :])
        return self.root + attributes(key)

    # -- calls of methods

    def called(self, line: Invoke | LayerLoop, names: Names, at: int, lead: str | None) -> Iterator[str]:
        if isinstance(line, LayerLoop):
            yield from self.loop(line, names, at)
        else:
            yield self.invoke(line, names, at, lead)

    def invoke(self, item: Invoke, names: Names, at: int, lead: str | None) -> str:
        inputs = [self.ref(name, names, lead) for name in item.inputs]
        if item.at is not None:
            inputs = ["at" if item.at == lead else self.root + attributes(item.at), *inputs]
            if self.unit_of and lead is None:
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
                    yield f"{word} = {before}"
                words[place] = word
        results: list[str] = []
        by_output = {out: words[place] for place, out in loop.carried}
        lists = {place: _list_name(loop, place, names) for place, _ in loop.collected}
        for word in lists.values():
            yield f"{word} = []"
        for place, value in enumerate(loop.results):
            if place in by_output:
                results.append(by_output[place])
            else:
                results.append(names.bind(value, at, [*results, *reserved]))
        span = "" if (loop.first, loop.last + 1) == (0, loop.total) else f"[{loop.first}:{loop.last + 1}]"
        yield f"for at in {self.root}{attributes(loop.path)}{span}:"
        if self.unit_of:
            for index in range(loop.first, loop.last + 1):
                self.units.setdefault(f"{loop.path}.{index}" if loop.path else str(index))
        yield f"{INDENT}{', '.join(results)} = {_call(loop.method, ['at', *words], loop.recompute)}"
        for place, values in loop.collected:
            yield f"{INDENT}{lists[place]}.append({results[place]})"
            for number, value in enumerate(values):
                names.words[value] = f"{lists[place]}[{number}]"


def _list_name(loop: LayerLoop, place: int, names: Names) -> str:
    word = f"every_{preferred_name(loop.results[place])}"
    while word in names.bound or word in names.taken:
        word += "_"
    names.taken.add(word)
    return word


class _Raw(str):
    """Text that prints as it is."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


def _relative(op: Op, lead: str | None) -> Op:
    """In a layer's method the key of a random op is written relative to the layer."""
    key = op.argument("op_key")
    return op if lead is None or not isinstance(key, str) else op.with_arguments(op_key=_Raw(key_text(key, lead)))


def key_text(key: str, lead: str | None) -> str:
    """A key as a string, relative to the layer that a method is written for."""
    inside = lead is not None and key.startswith((f"{lead}.", f"{lead}@", f"{lead} "))
    return f'f"{{at}}{key[len(lead or "") :]}"' if inside else f'"{key}"'


def gather_text(unit: str, lead: str | None, nests: bool) -> str:
    """The line that gathers a unit: for a block of lines, unless that would cross the end of another one."""
    if not unit:
        return 'self.open("")  # the parameters outside of layers stay gathered for backward'
    return f"with self.gathered({unit_text(unit, lead)}):" if nests else f"self.open({unit_text(unit, lead)})"


def unit_text(unit: str, lead: str | None) -> str:
    return "at" if unit == lead else f'"{unit}"'


def _call(method: Method, words: Sequence[str], recompute: bool) -> str:
    if recompute:
        return f"runtime.recompute({', '.join([f'self.{method.name}', *words])})"
    return f"self.{method.name}({', '.join(words)})"


def attributes(key: str) -> str:
    """A state-dict key as attribute access."""
    text = ""
    for part in key.split("."):
        if not part:
            continue
        text += f"[{part}]" if part.isdigit() else f".{part}" if part.isidentifier() else f'["{part}"]'
    return text

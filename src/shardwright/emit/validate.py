"""Translation validation: generated code is read back and must say what the program says.

The file is parsed and run without tensors: every name stands for a value of the program, loops turn,
methods are entered. Each line that is met must be the next op of the program, with that op's
arguments, on the values that the op reads; what it binds then stands for what the op makes.

    x = self.block(at, x)             enters `block` with at = "blocks.3" and x = "add_7"
    up = F.linear(ln2, at.up.weight)  must be aten.linear.default(input="ln2_3", weight=<blocks.3.up.weight>)

So an argument that is dropped, a word that stands for another layer's value, or a size that a name
shadows is a LoweringError when the model is compiled, and never a wrong number. A line that a loop
repeats is compared in full once; after that only the values that it reads are.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from threading import Lock

from ..errors import LoweringError
from ..ir import Op
from ..layout import Axis
from ..lower import LoweredProgram
from ..ops.reading import dotted, keywords
from ..rules import is_random
from .branches import keyed
from .calls import returns_list
from .meaning import FileNames, Place, Scope, argument_faults, module_faults
from .outline import outline_faults

IMPORTS = frozenset({"torch", "F", "runtime", "comm", "shard", "local_size", "R", "ParameterEntry", "Program"})
"""What files import, as far as they read it. Nothing else may have such a name."""

_PARSING = Lock()
"""CPython 3.11 counts the depth of a tree that it makes once for all threads: two at a time end in a SystemError."""


def validate(program: LoweredProgram, text: str) -> None:
    """Raise if a generated file says something else than its program."""
    try:
        with _PARSING:
            tree = ast.parse(text)
        for fault in outline_faults(tree):
            raise ValueError(f"{fault}, which is nothing that is written there")
        _compare(program, tree)
    except (AttributeError, IndexError, KeyError, SyntaxError, TypeError, ValueError) as error:
        raise LoweringError(
            f"generated code for {program.graph.name} can't be read back: {error}. This is a fault of shardwright, "
            "please report it"
        ) from error


def _compare(program: LoweredProgram, tree: ast.Module) -> None:
    (defined,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    methods = {node.name: node for node in defined.body if isinstance(node, ast.FunctionDef)}
    file = _names(program, tree, defined, methods)
    reader = _TextReader(program, file, methods)
    reader.expect([dotted(base) for base in defined.bases] == ["Program"], defined, "it is no program")
    constants = [replace(op, no_grad=False, region=None) for op in program.constants]  # none of them has a gradient
    reader.run("constants", constants, [], None)
    if program.early:
        sources = [early.source for early in program.early]
        reader.run("prologue", program.prologue, [entry.value for entry in program.prologue_inputs], sources)
        reader.counts(defined)
    gathered_by, reader.gathered_by = reader.gathered_by, {}  # whoever calls a branch hands it gathered parameters
    for graph in program.graph.branches.values():
        ops = [keyed(graph, op) for op in graph.ops]
        outputs = [output.value for output in graph.outputs if output.value is not None]
        reader.run(graph.name, ops, [entry.value for entry in graph.inputs], outputs)
    outputs = [name for name in program.outputs if name is not None]
    reader.gathered_by = gathered_by
    reader.updates = dict(program.updates)
    reader.run("forward", program.body, [entry.value for entry in program.graph.inputs], outputs)
    reader.expect(not reader.updates, methods["forward"], f"the updates {reader.updates} are not in it")


def _names(
    program: LoweredProgram, tree: ast.Module, defined: ast.ClassDef, methods: Mapping[str, ast.FunctionDef]
) -> FileNames:
    """What the top of a file defines, each name once."""
    assigned = [
        (node.targets[0].id, node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = [alias.asname or alias.name for node in imports for alias in node.names]
    names = [*(name for name, _ in assigned), *imported]
    if len(set(names)) < len(names):
        raise ValueError(f"it defines {', '.join(sorted({name for name in names if names.count(name) > 1}))} twice")
    read = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    if not read & IMPORTS <= set(imported):
        raise ValueError(f"it does not import {', '.join(sorted(read & IMPORTS - set(imported)))}")
    plain = dict(assigned)
    uneven = {
        dotted(node.targets[0]).removeprefix("self."): node.value
        for node in (methods["sizes"].body if "sizes" in methods else ())
        if isinstance(node, ast.Assign)
    }
    keys = {key: spec.value for spec in program.parameters for key in spec.keys}
    buffers = {buffer.key: buffer.value for buffer in program.graph.buffers}
    return FileNames(
        program=program,
        keys=keys | buffers,
        own_keys={spec.name: spec.value for spec in program.parameters} | buffers,
        sizes={name: int(ast.literal_eval(node)) for name, node in plain.items() if isinstance(node, ast.Constant)},
        uneven=uneven,
        groups=frozenset(ast.literal_eval(plain["GROUPS"])),
        functions={
            name: str(ast.literal_eval(node.args[0]))
            for name, node in plain.items()
            if isinstance(node, ast.Call) and dotted(node.func) == "runtime.find"
        },
        imported=frozenset(imported),
        hidden=frozenset({defined.name}),
        places=tuple(_places(program.mesh.axes, bool(uneven))),
    )


def _places(axes: Sequence[Axis], uneven: bool) -> Iterable[Place]:
    """The ranks that sizes are compared for: the first, and where ranks differ, those along every axis."""
    first = {axis.name: 0 for axis in axes}
    yield first
    if uneven:
        for axis in axes:
            yield from ({**first, axis.name: place} for place in range(1, axis.size))


@dataclass(frozen=True, slots=True)
class _Compared:
    """A line that was compared in full with an op, and the expressions that it reads that op's inputs by."""

    op: Op
    reads: tuple[tuple[ast.expr, int], ...]


class _TextReader:
    """Goes through methods, and takes one op of the program after the other."""

    def __init__(self, program: LoweredProgram, file: FileNames, methods: Mapping[str, ast.FunctionDef]) -> None:
        self.program, self.file, self.methods = program, file, methods
        gathered = [spec for spec in program.parameters if spec.storage.shards_parameter]
        self.gathered_by = {spec.value: spec.unit for spec in gathered}  # the unit that holds a value
        self.updates: dict[str, str] = {}  # that no line was met for yet
        self.coming: list[Op] = []  # ops of the program that no line was met for yet, the next one last
        self.contexts: list[Context] = []
        self.recomputing: dict[str, str | None] | None = None  # the region of the recompute call that runs
        self.gathered: set[str] = set()  # units of ZeRO-3
        self.compared: dict[int, _Compared] = {}

    def expect(self, holds: bool, node: ast.AST, fault: str) -> None:
        if not holds:
            raise LoweringError(
                f"generated code would not compute what {self.program.graph.name} computes: line "
                f"{getattr(node, 'lineno', 0)}, `{ast.unparse(node).splitlines()[0]}`: {fault}. This is a fault of "
                "shardwright, please report it; keeping the submodule out with sw.opaque(submodule) avoids it"
            )

    def run(self, name: str, ops: Sequence[Op], inputs: Sequence[str], outputs: Sequence[str] | None) -> None:
        """A method, which must do these ops and return these values."""
        if not ops and name not in self.methods:
            return
        self.coming = list(reversed(ops))
        method = self.methods[name]
        returned = self.enter(method, None, inputs)
        self.expect(not self.coming, method, f"it ends before {self.coming[-1] if self.coming else None}")
        self.expect(outputs is None or returned == outputs, method, f"it returns {returned} instead of {outputs}")

    def counts(self, defined: ast.ClassDef) -> None:
        """How what the prologue returns is reduced, and where forward finds it."""
        (listed,) = [node.value for node in defined.body if isinstance(node, ast.Assign)]
        items = listed.elts if isinstance(listed, ast.Tuple) else []
        self.expect(len(items) == len(self.program.early), listed, "it counts something else than the program")
        for node, early in zip(items, self.program.early, strict=True):
            self.expect(
                isinstance(node, ast.Call) and dotted(node.func) == "runtime.PrologueCount", node, "it is no count"
            )
            words = {name: ast.literal_eval(value) for name, value in keywords(node)}  # type: ignore[arg-type]
            self.file.fixed[f"known.{words.pop('name', None)}"] = early.value
            wanted = {"over": "_".join(early.axes), "op": early.how}
            self.expect({"over": "", "op": "sum", **words} == wanted, node, f"it stands for {early}")

    def enter(self, method: ast.FunctionDef, at: str | None, inputs: Sequence[str | None]) -> list[str | None]:
        names = [argument.arg for argument in method.args.args[1:] if argument.arg != "at"]
        self.expect(len(names) == len(inputs) and None not in inputs, method, f"it is called with {inputs}")
        self.expect(not any(self.file.has(name) for name in names), method, "it takes a name that the file needs")
        scope = Scope(file=self.file, values=dict(zip(names, inputs, strict=True)), at=at)  # type: ignore[arg-type]
        return self.block(method.body, scope)

    def block(self, statements: Sequence[ast.stmt], scope: Scope) -> list[str | None]:
        for node in statements:
            if isinstance(node, ast.Assign):
                self.assign(node, node.targets[0], scope)
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                self.call(node.value, scope)
            elif isinstance(node, ast.For):
                for layer in self.layers(node.iter, scope):
                    scope.at = layer
                    self.block(node.body, scope)
            elif isinstance(node, ast.With):
                self.within(node, scope)
            elif isinstance(node, ast.Return):
                items = node.value.elts if isinstance(node.value, ast.Tuple) else [node.value] if node.value else []
                return [scope.value(item) for item in items]
            else:
                self.expect(False, node, "no line of generated code reads so")
        return []

    def within(self, node: ast.With, scope: Scope) -> None:
        """A layer whose parameters are gathered for some lines, or lines that run under a mode."""
        outer, modes = self.contexts, [_context(item.context_expr, scope) for item in node.items]
        units = [unit for kind, unit in modes if kind == "gathered"]
        for unit in units:
            self.expect(unit not in self.gathered, node, f"{unit} is gathered already")
        self.expect(not units or not outer, node, "it gathers under a mode")
        self.contexts = [*outer, *(mode for mode in modes if mode[0] != "gathered")]
        self.gathered |= set(units)
        self.block(node.body, scope)
        self.gathered -= set(units)
        self.contexts = outer

    def layers(self, node: ast.expr, scope: Scope) -> list[str]:
        """The layers that a loop goes through: by their numbers, or all that the program has something of."""
        span = node.slice if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Slice) else None
        path = scope.path(node.value if span is not None and isinstance(node, ast.Subscript) else node)
        lead = f"{path}." if path else ""
        if span is not None:
            first, last = (0 if end is None else int(ast.literal_eval(end)) for end in (span.lower, span.upper))
            return [f"{lead}{number}" for number in range(first, last)]
        heads = {key[len(lead) :].split(".")[0] for key in self.file.keys if key.startswith(lead)}
        return [f"{lead}{number}" for number in sorted(int(head) for head in heads if head.isdigit())]

    def call(self, node: ast.Call, scope: Scope) -> None:
        """A line that binds nothing."""
        callee = dotted(node.func)
        if callee in ("self.open", "self.close"):
            unit = _unit(node.args[0], scope)
            opens = callee == "self.open"
            self.expect((unit in self.gathered) != opens, node, "it is gathered already, or not at all")
            (self.gathered.add if opens else self.gathered.discard)(unit)
        elif callee == "self.update":
            self.update(node, scope.text(node.args[0]), scope.value(node.args[1]))
        else:
            name, _, verb = callee.rpartition(".")
            values, value = scope.values.get(name), scope.value(node.args[0])
            self.expect(verb == "append" and isinstance(values, list) and value is not None, node, "it does nothing")
            values.append(value)  # type: ignore[union-attr, arg-type]

    def update(self, node: ast.expr, key: str | None, value: str | None) -> None:
        """A value that a buffer or a parameter gets."""
        update = self.updates.pop(key or "", None)
        self.expect(update is not None and value == update, node, f"the program updates {key} by {update}")

    def assign(self, node: ast.Assign, target: ast.expr, scope: Scope) -> None:
        words = target.elts if isinstance(target, ast.Tuple) else [target]
        value = node.value
        if isinstance(value, ast.List) and not value.elts:
            scope.values[words[0].id] = []  # type: ignore[attr-defined]
            return
        same = scope.value(value)
        if same is not None:
            self.bind(node, words, [same], scope)
            return
        method = _called(value, self.methods) if isinstance(value, ast.Call) else None
        if method is not None:
            self.bind(node, words, self.method(node, method, scope), scope)
            return
        if isinstance(value, ast.Call) and dotted(value.func) == "self.batch_norm":
            self.bind(node, words, [self.batch_norm(node, value, scope)], scope)
            return
        op = self.chain(node, value, scope)
        several = len(op.outputs) > 1 or returns_list(op)
        self.expect(isinstance(target, ast.Tuple) == several, node, "it takes a list for a tensor, or the other way")
        self.bind(node, words, op.outputs, scope)

    def bind(self, node: ast.AST, words: Sequence[ast.expr], values: Sequence[str], scope: Scope) -> None:
        self.expect(len(words) == len(values), node, f"it binds {len(words)} names to {len(values)} values")
        for word, value in zip(words, values, strict=True):
            name = dotted(word)
            if name.startswith("self.fixed."):
                self.expect(name[5:] not in self.file.fixed, node, "it is no constant of its own")
                self.file.fixed[name[5:]] = value
                continue
            self.expect(isinstance(word, ast.Name) and not self.file.has(name), node, "it binds no name of its own")
            scope.values[name] = value

    def method(self, node: ast.Assign, name: str, scope: Scope) -> list[str]:
        """A call of a method of the file, perhaps one that is run again in backward."""
        call: ast.Call = node.value  # type: ignore[assignment]
        recompute = dotted(call.func) == "runtime.recompute"
        method, arguments = self.methods[name], call.args[1:] if recompute else call.args
        at = None
        if [argument.arg for argument in method.args.args[1:2]] == ["at"]:
            at = scope.at if dotted(arguments[0]) == "at" else scope.path(arguments[0])
            arguments = arguments[1:]
        outer, gathered = self.recomputing, self.gathered
        if recompute:
            self.expect(outer is None, node, "it recomputes within what is recomputed")
            self.recomputing, self.gathered = {}, set()  # in backward it has to gather all that it reads
        returned = self.enter(method, at, [scope.value(argument) for argument in arguments])
        if recompute:
            self.recomputing, self.gathered = outer, gathered
        self.expect(None not in returned, node, "it returns something that is no value")
        return [str(value) for value in returned]

    def chain(self, node: ast.Assign, value: ast.expr, scope: Scope) -> Op:
        """A line of one op, or of several: `x.view(b, S, D).transpose(1, 2)` is a view, and then its transpose."""
        shown = value.func if isinstance(value, ast.Call) else value
        inner = shown.value if isinstance(shown, ast.Attribute | ast.Subscript) else None
        if isinstance(inner, ast.Call) and dotted(inner.func).startswith("runtime."):
            inner = None  # one of its results, no view of them
        if isinstance(inner, ast.Call | ast.Subscript) and scope.value(inner) is None:
            (scope.chained[id(inner)],) = self.chain(node, inner, scope).outputs
        op = self.op(node, value, scope)
        scope.chained.pop(id(inner), None)
        return op

    def op(self, node: ast.Assign, value: ast.expr, scope: Scope) -> Op:
        """An expression that stands for the next op of the program."""
        op = self.next_op(node)
        before = self.compared.get(id(value))
        if before is None or not _reads_alike(before, op, scope):
            scope.reads.clear()
            for fault in (*argument_faults(op, value, scope), *self.context_faults(op)):
                self.expect(False, node, f"it stands for {op}, but {fault}")
            self.compared[id(value)] = _Compared(op, tuple(scope.reads))
        return op

    def batch_norm(self, node: ast.Assign, call: ast.Call, scope: Scope) -> str:
        """Two ops, the count of batches and the norm, and the updates of all buffers of its module."""
        count, norm = self.next_op(node), self.next_op(node)
        faults = [*module_faults(count, norm, call, scope), *self.context_faults(count), *self.context_faults(norm)]
        for fault in faults:
            self.expect(False, node, f"it stands for {count} and {norm}, but {fault}")
        output, mean, var = norm.outputs
        written = {"num_batches_tracked": count.outputs[0], "running_mean": mean, "running_var": var}
        for name, value in written.items():
            self.update(call, f"{scope.path(call.args[1])}.{name}", value)
        return output

    def next_op(self, node: ast.Assign) -> Op:
        """The op whose turn it is; it must be in the region that runs, and what it reads must be gathered."""
        self.expect(bool(self.coming), node, "the program ends before it")
        op = self.coming.pop()
        region = op.region if self.recomputing is None else self.recomputing.setdefault("region", op.region)
        if region != op.region or (region is None) != (self.recomputing is None):
            self.expect(False, node, f"{op} is in the region {op.region}, and the line in {region}")
        for name in op.inputs:
            if name in self.gathered_by and self.gathered_by[name] not in self.gathered:
                self.expect(False, node, f"it reads {name}, whose unit {self.gathered_by[name]!r} is not gathered")
        return op

    def context_faults(self, op: Op) -> Iterator[str]:
        wanted = [("drawing", op.name)] if is_random(op) else []
        wanted += [("torch.no_grad", "")] if op.no_grad else []
        wanted += [("autocast", op.autocast.split(":")[1])] if op.autocast else []
        if sorted(wanted) != sorted(self.contexts):
            yield f"it runs under {self.contexts} instead of {wanted}"


def _reads_alike(before: _Compared, op: Op, scope: Scope) -> bool:
    """Whether a line that is met again says the same of this op; if not, that is found out in full."""
    if op.target != before.op.target or op.arguments != before.op.arguments or op.argument("op_key") is not None:
        return False
    if (op.no_grad, op.autocast) != (before.op.no_grad, before.op.autocast) or is_random(op):
        return False
    return all(scope.value(node) == op.inputs[at] for node, at in before.reads)


Context = tuple[str, str]
"""A `with` around a line: what kind, and of what."""


def _context(node: ast.expr, scope: Scope) -> Context:
    call = dotted(node.func) if isinstance(node, ast.Call) else ""
    if isinstance(node, ast.Call) and call == "self.random.drawing":
        return "drawing", str(scope.text(node.args[0]))
    if isinstance(node, ast.Call) and call == "torch.autocast":
        return "autocast", dotted(node.args[1]).removeprefix("torch.")
    if isinstance(node, ast.Call) and call == "self.gathered":
        return "gathered", _unit(node.args[0], scope)
    return call, ""


def _unit(node: ast.expr, scope: Scope) -> str:
    unit = scope.at if dotted(node) == "at" else scope.text(node)
    if unit is None:
        raise ValueError(f"{ast.unparse(node)} names no unit")
    return unit


def _called(node: ast.Call, methods: Mapping[str, ast.FunctionDef]) -> str | None:
    """The method of the file that a call enters."""
    callee = dotted(node.args[0]) if dotted(node.func) == "runtime.recompute" and node.args else dotted(node.func)
    name = callee.removeprefix("self.")
    return name if callee.startswith("self.") and name in methods else None

"""What an expression of generated code stands for: a value of the program, a size, a group, an argument of an op."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from ..ir import Dtype, Op, Slot
from ..layout import MB, Block, Shard, chunk_bounds
from ..lower import LoweredProgram, Size
from ..ops import op_kind
from ..ops.contexts import GROUP_ARGUMENTS
from ..ops.norms import batch_norm_faults
from ..ops.reading import UnreadableLineError, dotted, keywords
from .parse import parse_line, spec_of_line

REDUCTIONS = {"none": 0, "mean": 1, "sum": 2}
EVEN_BY_DEFAULT = (
    "comm.",
    "runtime.all_gather_linears",
    "runtime.context_attention",
    "runtime.cross_entropy",
    "runtime.embedding_rows",
    "runtime.linear_cross_entropy",
)
"""Ops whose lines leave out a sharding that is even and contiguous."""

Place = Mapping[str, int]
"""Coordinates of a rank on the axes of the mesh."""


@dataclass(frozen=True, kw_only=True)
class FileNames:
    """What names mean everywhere in a file."""

    program: LoweredProgram
    keys: Mapping[str, str]  # the key of a parameter or buffer -> its value
    own_keys: Mapping[str, str]  # the same, with one key for a tied parameter: the one by which lines call it
    sizes: Mapping[str, int]
    uneven: Mapping[str, ast.expr]  # attributes that hold sizes which differ between ranks
    groups: frozenset[str]
    functions: Mapping[str, str]  # names of the user's functions -> their paths
    imported: frozenset[str]
    hidden: frozenset[str]  # names that stand for something else after the sizes are set: the class
    fixed: dict[str, str] = field(default_factory=dict)  # attributes of `self.fixed` and `self.known` -> values
    places: tuple[Place, ...] = ()

    def has(self, name: str) -> bool:
        """Whether a name means something in all of the file, so that no method may bind it."""
        return name in self.imported or name in self.sizes or name in self.functions or name in self.hidden


@dataclass(kw_only=True)
class Scope:
    """What names mean inside of a method."""

    file: FileNames
    values: dict[str, str | list[str]] = field(default_factory=dict)
    at: str | None = None  # the layer that the method is entered for
    reads: list[tuple[ast.expr, int]] = field(default_factory=list)  # expressions, and the op's inputs they stand for
    chained: dict[int, str] = field(default_factory=dict)  # what inner expressions of a line stand for, by identity

    def value(self, node: ast.expr) -> str | None:
        """The value of the program that an expression names, None if it is more than a name."""
        if id(node) in self.chained:
            return self.chained[id(node)]
        if isinstance(node, ast.Name):
            bound = self.values.get(node.id)
            return bound if isinstance(bound, str) else None
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in self.values:
            bound = self.values[node.value.id]
            at = node.slice.value if isinstance(node.slice, ast.Constant) else None
            return bound[at] if isinstance(bound, list) and isinstance(at, int) and at < len(bound) else None
        path = self.path(node)
        if path is None:
            return None
        return self.file.fixed[path] if path in self.file.fixed else self.file.keys.get(path)

    def path(self, node: ast.expr) -> str | None:
        """The key that `self.blocks[0].weight` or `at.weight` stands for."""
        steps: list[str] = []
        while isinstance(node, ast.Attribute | ast.Subscript):
            if isinstance(node, ast.Attribute):
                steps.append(node.attr)
            elif isinstance(node.slice, ast.Constant):
                steps.append(str(node.slice.value))
            else:
                return None
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self.values:
            return None
        if node.id == "at" and self.at is not None:
            return ".".join([self.at, *reversed(steps)])
        if node.id != "self":
            return None
        path = list(reversed(steps))
        return ".".join(path[1:] if path[:1] == ["module"] else path)

    def number(self, node: ast.expr, place: Place) -> float | int | None:
        """What an expression of sizes is for a rank; None if it is none."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, int | float) and not isinstance(node.value, bool) else None
        if isinstance(node, ast.Name):
            known = node.id not in self.values and node.id not in self.file.hidden
            return self.file.sizes.get(node.id) if known else None
        if isinstance(node, ast.Attribute):
            text = dotted(node).removeprefix("self.")
            return self.number(self.file.uneven[text], place) if text in self.file.uneven else None
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.number(node.operand, place)
            return None if inner is None else -inner
        if isinstance(node, ast.BinOp):
            left, right = self.number(node.left, place), self.number(node.right, place)
            if left is None or right is None:
                return None
            signs = {ast.Add: left + right, ast.Mult: left * right}
            return signs.get(type(node.op))
        if isinstance(node, ast.Call) and dotted(node.func) == "local_size":
            total, axis = self.number(node.args[0], place), dotted(node.args[1]).removeprefix("self.")
            if not isinstance(total, int) or axis not in place:
                return None
            return chunk_bounds(total, self.file.program.mesh.sizes[axis], place[axis])[1]
        if isinstance(node, ast.Call) and dotted(node.func) == "float" and isinstance(node.args[0], ast.Constant):
            return float(node.args[0].value)  # type: ignore[arg-type]
        return None

    def means(self, node: ast.expr, value: Any, op: Op) -> bool:
        """Whether an expression stands for an argument of an op."""
        if isinstance(value, Slot):
            self.reads.append((node, value.index))
            return self.value(node) == op.inputs[value.index]
        if isinstance(value, Size):
            sizes = self.file.program.mesh.sizes
            return all(self.number(node, place) == value.local(sizes, place) for place in self.file.places)
        if isinstance(value, Shard):
            return self.sharding(node) == value
        if isinstance(value, tuple):
            items = node.elts if isinstance(node, ast.Tuple | ast.List) else [node]
            return len(items) == len(value) and all(self.means(*pair, op) for pair in zip(items, value, strict=True))
        if isinstance(value, dict):
            if not isinstance(node, ast.Dict) or len(node.keys) != len(value):
                return False
            pairs = zip((self.text(key) for key in node.keys if key is not None), node.values, strict=True)
            return all(key in value and self.means(item, value[key], op) for key, item in pairs)
        if isinstance(value, Dtype):
            return dotted(node) == f"torch.{value}"
        if value is None or isinstance(value, bool | str):
            return self.text(node) == value if isinstance(value, str) else _is_constant(node, value)
        number = self.number(node, self.file.places[0])
        return (number == value and type(number) is type(value)) or (value != value and number != number)

    def text(self, node: ast.expr) -> str | None:
        """A string; f"{at}.attn" is written relative to the layer."""
        if isinstance(node, ast.Constant):
            return node.value if isinstance(node.value, str) else None
        if not isinstance(node, ast.JoinedStr):
            return None
        parts: list[str] = []
        for part in node.values:
            if isinstance(part, ast.Constant):
                parts.append(str(part.value))
            elif isinstance(part, ast.FormattedValue) and dotted(part.value) == "at" and self.at is not None:
                parts.append(self.at)
            else:
                return None
        return "".join(parts)

    def group(self, node: ast.expr) -> tuple[str, ...] | None:
        """The axes of a group, `self.dp_tp`."""
        name = dotted(node).removeprefix("self.")
        return tuple(name.split("_")) if dotted(node).startswith("self.") and name in {*self.file.groups, MB} else None

    def sharding(self, node: ast.expr) -> Shard | None:
        """`shard("tp", 3, 2, 16)` or `shard("tp", (1, 4, 8), (1, 2, 8), repeat=2)`."""
        if not isinstance(node, ast.Call) or dotted(node.func) != "shard":
            return None
        try:
            axis, *rest = (ast.literal_eval(arg) for arg in node.args)
            rows = rest if rest and isinstance(rest[0], tuple) else [tuple(rest)]
            repeat = next((ast.literal_eval(key.value) for key in node.keywords if key.arg == "repeat"), 1)
            return Shard(axis=axis, blocks=tuple(Block(*row) for row in rows), repeat=repeat)
        except (ValueError, TypeError):
            return None


def _where_it_reads(op: Op) -> str:
    """The field that says how lines of an op read."""
    kind, spec = op_kind(op.target.removeprefix("weights.")), spec_of_line(op)
    if spec.prints is None:
        return ""
    if spec.reads is None:
        return f"; {kind} has no `reads`, the form of the line that its `prints` writes (its definition in ops/)"
    return f"; `prints` and `reads` of {kind} don't agree (its definition in ops/)"


def argument_faults(op: Op, node: ast.expr, scope: Scope) -> Iterator[str]:
    """Where the right-hand side of a line says something else than its op."""
    try:
        read = parse_line(op, node)
    except UnreadableLineError as error:
        yield f"{error}{_where_it_reads(op)}"
        return
    path = scope.file.functions.get(dotted(node.func)) if isinstance(node, ast.Call) else None
    if path is not None and op.target != f"call.{path}":
        yield f"it calls {path}"
    defaults = spec_of_line(op).defaults
    for name, value in expected(op, scope).items():
        written = read.pop(name, None)
        if written is None:
            if not _may_be_left_out(op, name, value, defaults, scope):
                yield f"{name}={value!r} is not in it"
        elif not _says(scope, op, name, written, value):
            text, known = ast.unparse(written), GROUP_ARGUMENTS
            group = name not in known and isinstance(value, tuple) and text.startswith("self.")
            hint = f"; an argument of axes is called {', '.join(known[:-1])} or {known[-1]}" if group else ""
            yield f"{name} is {text} in it, and {value!r} in the op{hint}"
    for name, written in read.items():
        if not (_is_constant(written, None) or (name in defaults and _says(scope, op, name, written, defaults[name]))):
            yield f"{name}={ast.unparse(written)} is in it, and not in the op"


def module_faults(count: Op, norm: Op, node: ast.Call, scope: Scope) -> Iterator[str]:
    """Where `self.batch_norm(x, module, momentum=..., eps=..., over=..., local=...)` is something else than its ops."""
    module = scope.path(node.args[1])
    if len(node.args) != 2 or not module:
        yield "it is no batch norm of a module"
        return
    yield from batch_norm_faults(count, norm, module, scope.file.keys)
    if norm.tensor("input") != scope.value(node.args[0]):
        yield f"it reads {norm.tensor('input')}"
    written = dict(keywords(node))
    for name in ("momentum", "eps"):
        if name not in written or not scope.means(written.pop(name), norm.argument(name), norm):
            yield f"{name} is {norm.argument(name)}"
    over = written.pop("over", None)
    if norm.argument("axes") != (() if over is None else scope.group(over)):
        yield f"it is over {norm.argument('axes')}"
    local = written.pop("local", None)
    if norm.argument("local", False) != (local is not None and _is_constant(local, True)):
        yield f"local is {norm.argument('local', False)}"
    yield from (f"{name} is not in the op" for name in written)


def expected(op: Op, scope: Scope) -> dict[str, Any]:
    """The arguments that a line of an op has to give."""
    spec = spec_of_line(op)
    arguments = {name: value for name, value in op.arguments if name not in spec.unprinted}
    if op.target.startswith("comm."):
        for flag in ("later", "in_place"):  # they choose the callee
            arguments.pop(flag, None)
        state = {spec.state: "R"} if spec.state is not None else {}
        return {"x": Slot(0), **arguments, **state}
    return arguments if spec.expects is None else spec.expects(op, arguments, scope.file.own_keys)


def _says(scope: Scope, op: Op, name: str, node: ast.expr, value: Any) -> bool:
    aten = op.target.startswith(("aten.", "weights."))
    if name in GROUP_ARGUMENTS and isinstance(value, tuple) and not aten:
        return scope.group(node) == value if value else _is_constant(node, None)
    if name == spec_of_line(op).state:
        return isinstance(node, ast.Name) and node.id == value and value in scope.file.imported
    if name == "reduction":
        named = REDUCTIONS.get(str(node.value)) if isinstance(node, ast.Constant) else None
        return named == value or scope.means(node, value, op)
    if name == "splits":
        items = node.elts if isinstance(node, ast.List) else []
        return len(items) == len(value) and all(
            isinstance(item, ast.Tuple)
            and scope.means(item.elts[0], dim, op)
            and scope.group(item.elts[1]) == (shard.axis,)
            and scope.means(item.elts[2], shard, op)
            for item, (dim, shard) in zip(items, value, strict=True)
        )
    if op.target.startswith("call.") and isinstance(node, ast.Attribute) and isinstance(value, str):
        return dotted(node) == f"self.{value}"  # a branch is a method
    return scope.means(node, value, op)


def _may_be_left_out(op: Op, name: str, value: Any, defaults: Mapping[str, Any], scope: Scope) -> bool:
    if value is None or (name in defaults and defaults[name] == value):
        return True
    if name in ("sharding", "to_sharding") and op.target.startswith(EVEN_BY_DEFAULT):
        return _is_plain(value, op, scope)
    leaves_out = spec_of_line(op).leaves_out
    if leaves_out is not None:
        return leaves_out(op, name, value)
    return not op.target.startswith("aten.") and value in (False, ())


def _is_plain(shard: Shard, op: Op, scope: Scope) -> bool:
    """Whether a shard is the even contiguous one, which is what is meant where none is given."""
    parts = 1
    for axis in op.argument("classes") or op.argument("ring") or op.argument("axes"):
        parts *= scope.file.program.mesh.sizes[axis]
    return shard.simple(parts) and shard.blocks[0].size == parts


def _is_constant(node: ast.expr, value: object) -> bool:
    return isinstance(node, ast.Constant) and node.value is value

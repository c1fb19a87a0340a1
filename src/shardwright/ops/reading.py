"""A line of generated code, read back: which arguments of its op it gives, by their names.

Translation validation (`emit/validate.py`) compares what is read here with the op that the line stands for. So
nothing may be taken from the printers: what `F.pad` does with its second argument is written again in the form that
its op reads as (`OpSpec.reads`), in torch's words. `tests/emit/test_validate.py` holds the forms against torch's own
signatures.

A form is a callee and the op's arguments in the callee's order: "F.gelu(self, approximate)". `x` is the first
argument of the op, a star takes all that are left. A reader is a function of the op and the line instead.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from functools import cache

from ..ir import Op

Arguments = dict[str, ast.expr]
"""The arguments of an op as the line writes them, by the op's own names for them."""

Reader = Callable[[Op, ast.expr], Arguments]


class UnreadableLineError(Exception):
    """A line that does not read as a call of its op."""


def dotted(node: ast.expr) -> str:
    """A chain of attributes as text; empty for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    inner = dotted(node.value) if isinstance(node, ast.Attribute) else ""
    return f"{inner}.{node.attr}" if inner and isinstance(node, ast.Attribute) else ""


def keywords(node: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    """Keyword arguments, those of `**{"from": x}` too."""
    for keyword in node.keywords:
        if keyword.arg is not None:
            yield keyword.arg, keyword.value
        elif isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                if not isinstance(key, ast.Constant):
                    raise UnreadableLineError("it has a keyword that is no text")
                yield str(key.value), value
        else:
            raise UnreadableLineError("it has keywords that can't be read")


def read_by_name(op: Op, node: ast.Call) -> Arguments:
    """The first argument by its place, the others by their names."""
    if len(node.args) > 1:
        raise UnreadableLineError("it has more than one argument without a name")
    read = {op.arguments[0][0]: node.args[0]} if node.args else {}
    return _with_keywords(read, node, {})


def _with_keywords(read: Arguments, node: ast.Call, names: Mapping[str, str]) -> Arguments:
    for keyword, value in keywords(node):
        name = names.get(keyword, keyword)
        if name in read:
            raise UnreadableLineError(f"it gives {name} twice")
        read[name] = value
    return read


@cache
def _form(text: str) -> tuple[str, tuple[str, ...]]:
    callee, _, rest = text.partition("(")
    return callee, tuple(rest.removesuffix(")").split(", "))


def read_form(
    op: Op, node: ast.expr, form: str, positional: int | None = None, renamed: Mapping[str, str] | None = None
) -> Arguments:
    """The arguments of a call that has a form; at most `positional` of them without a name."""
    if not isinstance(node, ast.Call):
        raise UnreadableLineError(f"it is no call of {op.target}")
    callee, names = _form(form)
    read: Arguments = {}
    if callee.startswith("x.") and isinstance(node.func, ast.Attribute) and node.func.attr == callee[2:]:
        read[op.arguments[0][0]] = node.func.value
    elif dotted(node.func) != _called(op, callee):
        raise UnreadableLineError(f"it calls {dotted(node.func) or ast.unparse(node.func)} instead of {callee}")
    if names[-1].startswith("*"):
        count = len(names) - 1
        read |= dict(zip(names, node.args[:count], strict=False))
        name, rest = _size_name(op, names[-1][1:]), node.args[count:]
        alone = len(rest) == 1 and (isinstance(rest[0], ast.Tuple) or not isinstance(op.argument(name), tuple))
        read[name] = rest[0] if alone else as_tuple(rest)
    else:
        if len(node.args) > (len(names) if positional is None else positional):
            raise UnreadableLineError(f"it gives {len(node.args)} arguments by position")
        first = op.arguments[0][0] if op.arguments and not op.target.startswith("comm.") else "x"
        read |= {first if name == "x" else name: value for name, value in zip(names, node.args, strict=False)}
    return _with_keywords(read, node, renamed or {})


def _called(op: Op, callee: str) -> str:
    if op.target.startswith("weights."):
        return f"self.weights.{callee.split('.', 1)[1]}"
    if op.argument("later"):
        return "runtime.all_reduce_pending"
    return f"{callee}_" if op.argument("in_place") else callee


def _size_name(op: Op, name: str) -> str:
    """`view` has overloads that call their sizes otherwise."""
    return name if op.argument(name) is not None or op.argument("size" if name == "shape" else "shape") is None else (
        "size" if name == "shape" else "shape"
    )  # fmt: skip


def as_tuple(items: list[ast.expr]) -> ast.expr:
    return ast.Tuple(elts=items, ctx=ast.Load())

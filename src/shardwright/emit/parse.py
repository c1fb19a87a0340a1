"""A line of generated code, read back as its op: by the form that the op's definition has (`OpSpec.reads`).

Translation validation (`validate.py`) compares what is read here with the op that the line stands for; see
`ops/reading.py` for why nothing of it is taken from the printers.
"""

from __future__ import annotations

import ast

from ..ir import Op
from ..ops import OpSpec, spec_of
from ..ops.reading import Arguments, UnreadableLineError, dotted, read_by_name, read_form

SIGNS: dict[type[ast.operator] | type[ast.cmpop], tuple[str, ...]] = {
    ast.Add: ("add",), ast.Sub: ("sub",), ast.Mult: ("mul",), ast.Div: ("div",), ast.Pow: ("pow",),
    ast.MatMult: ("matmul", "mm", "bmm"), ast.BitAnd: ("bitwise_and", "__and__"),
    ast.BitOr: ("bitwise_or", "__or__"), ast.Eq: ("eq",), ast.NotEq: ("ne",), ast.Lt: ("lt",), ast.LtE: ("le",),
    ast.Gt: ("gt",), ast.GtE: ("ge",),
}  # fmt: skip
"""The ops that an operator of Python calls on tensors."""

RIGHT = {"pow": "exponent", "mm": "mat2", "bmm": "mat2"}
"""What an op calls its right operand, where that is not `other`."""


def parse_line(op: Op, node: ast.expr) -> Arguments:
    """The arguments that a line gives its op; raises if the line is no call of that op."""
    base, spec = base_name(op), spec_of_line(op)
    if isinstance(node, ast.Call) and dotted(node.func) == f"torch.ops.{op.target}":
        return read_by_name(op, node)
    if callable(spec.reads):
        return spec.reads(op, node)
    if op.target.startswith("call.") and spec.reads is None:
        return _user_function(op, node)
    if isinstance(node, ast.BinOp | ast.Compare):
        return _operator(base, node)
    if not isinstance(node, ast.Call):
        raise UnreadableLineError(f"it is no call of {op.target}")
    if spec.reads is not None:
        return read_form(op, node, spec.reads, spec.positional, spec.keywords)
    if dotted(node.func) == f"torch.{base}":
        return read_by_name(op, node)
    if isinstance(node.func, ast.Attribute) and node.func.attr == base and not node.args and not node.keywords:
        return {op.arguments[0][0]: node.func.value}
    raise UnreadableLineError(f"it calls {dotted(node.func)}")


def spec_of_line(op: Op) -> OpSpec:
    """What is known of an op, also of one that computes gradients of its weights later."""
    return spec_of(op.target.removeprefix("weights."))


def base_name(op: Op) -> str:
    """The op without its library and its overload: "linear"."""
    return op.target.removeprefix("weights.").removeprefix("aten.").rsplit(".", 1)[0]


def _operator(base: str, node: ast.BinOp | ast.Compare) -> Arguments:
    left = node.left
    sign: ast.operator | ast.cmpop = node.ops[0] if isinstance(node, ast.Compare) else node.op
    right = node.comparators[0] if isinstance(node, ast.Compare) else node.right
    if isinstance(node, ast.Compare) and len(node.ops) > 1:
        raise UnreadableLineError("it compares more than two")
    if base not in SIGNS.get(type(sign), ()):
        raise UnreadableLineError(f"its operator is not that of {base}")
    read = {"self": left}
    if base in ("add", "sub") and isinstance(right, ast.BinOp) and isinstance(right.op, ast.Mult):
        read["alpha"], right = right.left, right.right
    return read | {RIGHT.get(base, "other"): right}


def _user_function(op: Op, node: ast.expr) -> Arguments:
    """A function of the user's takes everything by position."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != len(op.arguments):
        raise UnreadableLineError("it is no call with all arguments by position")
    return {name: value for (name, _), value in zip(op.arguments, node.args, strict=True)}

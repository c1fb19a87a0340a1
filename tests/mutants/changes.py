"""The mutants of a file: one operator, constant, argument or statement of one function changed at a time.

What can't change a result is left alone: messages (strings, and all that `raise` says), asserts (`strict` of a `zip`
is one), annotations, decorators and docstrings.
"""

from __future__ import annotations

import ast
import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

UNSEEN = ("__repr__", "__str__")  # what only a reader of messages sees
FLIPPED = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
OPPOSITE = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A file of the package with one thing changed."""

    file: str  # below the root of the package: "rules/views.py"
    line: int
    change: str  # what was changed, in words
    before: str
    after: str
    span: tuple[int, int]  # the bytes of the file that are changed

    def __str__(self) -> str:
        return f"{self.file}:{self.line} {self.change}: `{_short(self.before)}` -> `{_short(self.after)}`"

    def text(self, root: Path) -> str | None:
        """The whole file after the change, or None if that can't be compiled, such as `break` outside of a loop."""
        whole, (first, last) = (root / self.file).read_bytes(), self.span
        text = (whole[:first] + self.after.encode() + whole[last:]).decode()
        try:
            compile(text, self.file, "exec")
        except SyntaxError:
            return None
        return text


def mutants(root: Path, file: str) -> Iterator[Mutant]:
    """Every mutant of a file, in the order of its lines."""
    text = (root / file).read_text(encoding="utf-8")
    lines = text.encode().splitlines(keepends=True)
    starts = [0, *itertools.accumulate(map(len, lines))]
    for node in _nodes(ast.parse(text)):
        for change in CHANGES:
            other = change(node)
            if other is None or node.end_lineno is None or node.end_col_offset is None:
                continue
            span = starts[node.lineno - 1] + node.col_offset, starts[node.end_lineno - 1] + node.end_col_offset
            before, after = text.encode()[slice(*span)].decode(), ast.unparse(other)
            yield Mutant(
                file=file, line=node.lineno, change=change.__name__.replace("_", " "), before=before,
                after=f"({after})" if isinstance(other, ast.expr) else after, span=span,
            )  # fmt: skip


def _nodes(tree: ast.Module) -> Iterator[ast.expr | ast.stmt]:
    """The statements and expressions of the functions of a file that are worth a change."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield from _within(node)
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield from _within(inner)


def _within(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    if isinstance(node, ast.FunctionDef):
        if node.name in UNSEEN:
            return
        children: list[ast.AST] = [
            *node.args.defaults,
            *(default for default in node.args.kw_defaults if default),
            *node.body,
        ]
    elif isinstance(node, ast.AnnAssign):
        children = [node.value] if node.value is not None else []
    else:
        children = [*ast.iter_child_nodes(node)]
    for child in children:
        if isinstance(child, ast.JoinedStr | ast.Assert) or _is_text(child) or _is_strict(child):
            continue
        if isinstance(child, ast.expr | ast.stmt):
            yield child
        if not isinstance(child, ast.Raise):
            yield from _within(child)


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _is_strict(node: ast.AST) -> bool:
    """`zip(..., strict=True)` asserts that lengths agree: where they do, it makes no difference."""
    return isinstance(node, ast.keyword) and node.arg == "strict"


def _short(text: str) -> str:
    joined = " ".join(text.split())
    return joined if len(joined) <= 100 else joined[:97] + "..."


# Each gives the node that takes the place of one, or None where it has nothing to change.


def flip_comparison(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Compare) or type(node.ops[-1]) not in FLIPPED:
        return None
    other = copy.deepcopy(node)
    other.ops[-1] = FLIPPED[type(node.ops[-1])]()
    return other


def flip_arithmetic(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BinOp) or type(node.op) not in OPPOSITE:
        return None
    return ast.BinOp(left=node.left, op=OPPOSITE[type(node.op)](), right=node.right)


def swap_and_or(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.BoolOp):
        return None
    return ast.BoolOp(op=ast.Or() if isinstance(node.op, ast.And) else ast.And(), values=node.values)


def change_constant(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return None
    return ast.Constant(value=node.value + 1)  # type: ignore[operator]


def flip_bool(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool):
        return None
    return ast.Constant(value=not node.value)


def drop_not(node: ast.AST) -> ast.AST | None:
    return node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not | ast.USub) else None


def drop_returned(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Return) or node.value is None or _is_nothing(node.value):
        return None
    return ast.Return(value=ast.Constant(value=None))


def drop_keyword(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or not node.keywords or _is_strict(node.keywords[-1]):
        return None
    return ast.Call(func=node.func, args=node.args, keywords=node.keywords[:-1])


def drop_argument(node: ast.AST) -> ast.AST | None:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return None
    return ast.Call(func=node.func, args=node.args[:-1], keywords=node.keywords)


def remove_statement(node: ast.AST) -> ast.AST | None:
    """Only what is done for its effect: without a name that is bound, the next line would fail in any case."""
    if isinstance(node, ast.Expr | ast.AugAssign | ast.Raise | ast.Delete | ast.Continue | ast.Break):
        return ast.Pass()
    if isinstance(node, ast.If) and not node.orelse:
        return ast.Pass()
    if isinstance(node, ast.Assign) and all(
        isinstance(target, ast.Attribute | ast.Subscript) for target in node.targets
    ):
        return ast.Pass()
    return None


def _is_nothing(node: ast.expr) -> bool:
    """None, or what is as good as None to most who ask."""
    return isinstance(node, ast.Constant) and (node.value is None or node.value is False)


CHANGES: tuple[Callable[[ast.AST], ast.AST | None], ...] = (
    flip_comparison, flip_arithmetic, swap_and_or, change_constant, flip_bool, drop_not, drop_returned, drop_keyword,
    drop_argument, remove_statement,
)  # fmt: skip

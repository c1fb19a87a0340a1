"""Generated files with one thing changed: a statement left out, an argument dropped, a number or a name changed."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

from shardwright.emit import validate
from shardwright.errors import LoweringError
from shardwright.lower import LoweredProgram


def survivors(program: LoweredProgram, text: str) -> tuple[int, list[str]]:
    """How many mutants of the class a file has, and those that validation takes for the program."""
    count, left = 0, []
    for what, mutant in mutants(text):
        count += 1
        try:
            validate(program, mutant)
        except LoweringError:
            continue
        left.append(what)
    return count, left


def mutants(text: str) -> Iterator[tuple[str, str]]:
    """What was changed, and the text after it."""
    tree = ast.parse(text)
    (defined,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    for node in list(ast.walk(defined)):
        before = _fields(node)
        shown = ast.unparse(node).splitlines()[0] if isinstance(node, ast.expr | ast.stmt) else ""
        for change in CHANGES:
            if change(node):
                yield f"{change.__name__} in `{shown}`", ast.unparse(tree)
                vars(node).update(before)
                before = _fields(node)


def _fields(node: ast.AST) -> dict[str, object]:
    """What a node holds; lists are copied, since changes are made in them."""
    return {name: list(value) if isinstance(value, list) else value for name, value in vars(node).items()}


def drop_statement(node: ast.AST) -> bool:
    if not isinstance(node, ast.FunctionDef | ast.For | ast.With) or len(node.body) < 2:
        return False
    del node.body[len(node.body) // 2]
    return True


def drop_keyword(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or not node.keywords:
        return False
    node.keywords.pop()
    return True


def drop_argument(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) < 2:
        return False
    node.args.pop()
    return True


def swap_arguments(node: ast.AST) -> bool:
    if not isinstance(node, ast.Call) or len(node.args) < 2 or ast.dump(node.args[0]) == ast.dump(node.args[1]):
        return False
    node.args[0], node.args[1] = node.args[1], node.args[0]
    return True


def change_number(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or type(node.value) not in (int, float):
        return False
    node.value = 2 * node.value + 1  # type: ignore[operator]
    return True


def change_flag(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, bool):
        return False
    node.value = not node.value
    return True


def change_string(node: ast.AST) -> bool:
    if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
        return False
    node.value += "x"
    return True


def change_name(node: ast.AST) -> bool:
    if not isinstance(node, ast.Name) or isinstance(node.ctx, ast.Store):
        return False
    node.id += "_other"
    return True


def change_attribute(node: ast.AST) -> bool:
    if not isinstance(node, ast.Attribute):
        return False
    node.attr += "_other"
    return True


def change_sign(node: ast.AST) -> bool:
    if not isinstance(node, ast.BinOp):
        return False
    node.op = ast.Sub() if isinstance(node.op, ast.Add | ast.Mult) else ast.Mult()
    return True


def swap_targets(node: ast.AST) -> bool:
    if not isinstance(node, ast.Tuple) or not isinstance(node.ctx, ast.Store) or len(node.elts) < 2:
        return False
    node.elts.reverse()
    return True


def swap_calls(node: ast.AST) -> bool:
    """x.view(2, 3).transpose(0, 1) becomes x.transpose(0, 1).view(2, 3)."""
    inner = _receiver(node)
    if not isinstance(node, ast.Call) or not isinstance(inner, ast.Call):
        return False
    func, before = node.func, inner.func
    assert isinstance(func, ast.Attribute) and isinstance(before, ast.Attribute)
    swapped = ast.Call(func=ast.Attribute(before.value, func.attr), args=node.args, keywords=node.keywords)
    node.func, node.args, node.keywords = ast.Attribute(swapped, before.attr), inner.args, inner.keywords
    return True


def drop_call(node: ast.AST) -> bool:
    """x.view(2, 3).transpose(0, 1) becomes x.transpose(0, 1)."""
    inner = _receiver(node)
    if not isinstance(node, ast.Call) or not isinstance(inner, ast.Call):
        return False
    node.func = ast.Attribute(inner.func.value, node.func.attr)  # type: ignore[attr-defined]
    return True


def _receiver(node: ast.AST) -> ast.expr | None:
    """What the call before the last of a chain is a method of."""
    inner = node.func.value if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) else None
    return inner if isinstance(inner, ast.Call) and isinstance(inner.func, ast.Attribute) else None


def leave_block(node: ast.AST) -> bool:
    """The last line of a `with` stands behind it."""
    for name in ("body", "orelse"):
        lines = getattr(node, name, None)
        if not isinstance(lines, list):
            continue
        for at, line in enumerate(lines):
            if isinstance(line, ast.With) and len(line.body) > 1:
                shorter = ast.copy_location(ast.With(items=line.items, body=line.body[:-1]), line)
                setattr(node, name, [*lines[:at], shorter, line.body[-1], *lines[at + 1 :]])
                return True
    return False


def no_block(node: ast.AST) -> bool:
    """The lines of a `with` stand without it."""
    lines = getattr(node, "body", None)
    at = (
        next((at for at, line in enumerate(lines) if isinstance(line, ast.With)), None)
        if isinstance(lines, list)
        else None
    )
    if at is None or not isinstance(lines, list):
        return False
    node.body = [*lines[:at], *lines[at].body, *lines[at + 1 :]]  # type: ignore[attr-defined]
    return True


CHANGES: tuple[Callable[[ast.AST], bool], ...] = (
    drop_statement, drop_keyword, drop_argument, swap_arguments, change_number, change_flag, change_string, change_name,
    change_attribute, change_sign, swap_targets, swap_calls, drop_call, leave_block, no_block,
)  # fmt: skip

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


CHANGES: tuple[Callable[[ast.AST], bool], ...] = (
    drop_statement, drop_keyword, drop_argument, swap_arguments, change_number, change_flag, change_string, change_name,
    change_attribute, change_sign, swap_targets,
)  # fmt: skip

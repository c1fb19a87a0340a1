"""What may stand outside of the methods of a generated file: nothing there runs but what the compiler itself writes.

Names of plans, axes, modules and parameters come from files and from the user's model, and are written into this text.
One that broke out of its string would run when the file is loaded; such a file is refused here instead.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..ops.reading import dotted

IMPORTED = frozenset({"torch", "torch.nn.functional", "shardwright", "shardwright.runtime"})
CALLED = frozenset({"ParameterEntry", "shard", "range", "runtime.find", "runtime.PrologueCount"})
"""What the tables of a file and its list of functions call."""


def outline_faults(tree: ast.Module) -> Iterator[str]:
    """Statements and calls that no generated file has outside of its methods."""
    for node in tree.body:
        match node:
            case ast.Expr(value=ast.Constant()):
                continue
            case ast.Import() | ast.ImportFrom():
                module = [node.module or ""] if isinstance(node, ast.ImportFrom) else [item.name for item in node.names]
                yield from (f"line {node.lineno} imports {name}" for name in module if name not in IMPORTED)
            case ast.ClassDef(decorator_list=[], keywords=[]):
                for member in node.body:
                    yield from _member_faults(member)
            case ast.Assign(targets=[ast.Name()]):
                yield from _call_faults(node)
            case _:
                yield _fault(node)


def _member_faults(member: ast.stmt) -> Iterator[str]:
    match member:
        case ast.FunctionDef(decorator_list=[], returns=None, args=ast.arguments(defaults=[], kw_defaults=[])):
            yield from (_fault(member) for item in member.args.args if item.annotation is not None)
        case ast.Assign(targets=[ast.Name()]):
            yield from _call_faults(member)
        case _:
            yield _fault(member)


def _call_faults(node: ast.Assign) -> Iterator[str]:
    for part in ast.walk(node):
        called = isinstance(part, ast.Call) and dotted(part.func) not in CALLED
        if called or isinstance(part, ast.Await | ast.NamedExpr | ast.Lambda):
            yield f"line {node.lineno} has `{ast.unparse(part)[:80]}`"


def _fault(node: ast.stmt) -> str:
    return f"line {node.lineno} has `{ast.unparse(node).splitlines()[0][:80]}`"

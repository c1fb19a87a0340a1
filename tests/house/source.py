"""Reads the source of the package without importing it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

SRC = Path(__file__).parents[2] / "src" / "shardwright"
PACKAGE = "shardwright"


@dataclass(frozen=True, kw_only=True)
class Import:
    file: Path  # relative to the package
    line: int
    target: str  # absolute and dotted: "torch.nn", "shardwright.ir.graph"

    @property
    def package(self) -> str:
        """The package that imports: the first part of the path, without .py."""
        return self.file.parts[0].removesuffix(".py")

    @property
    def of(self) -> str | None:
        """The package of ours that is imported, or None."""
        parts = self.target.split(".")
        return parts[1] if parts[0] == PACKAGE and len(parts) > 1 else None

    def __str__(self) -> str:
        return f"{self.file}:{self.line} imports {self.target}"


def files(root: Path) -> list[Path]:
    return sorted(root.rglob("*.py"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    """All nodes of a file in the order of `ast.walk`, read once for the many tests that look at every file."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(root: Path) -> Iterator[Import]:
    """Every import below root, wherever it stands: at the top, in a function, under TYPE_CHECKING."""
    for path in files(root):
        file = path.relative_to(root)
        for node in nodes(path):
            for target in targets(node, file):
                yield Import(file=file, line=node.lineno, target=target)


def targets(node: ast.AST, file: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    package = (PACKAGE, *file.parent.parts)
    start = package[: len(package) - node.level + 1] if node.level else ()
    module = ".".join([*start, *([node.module] if node.module else [])])
    if module == PACKAGE:  # "from . import layout", "from shardwright import layout": the names are packages
        return [f"{PACKAGE}.{alias.name}" for alias in node.names]
    return [module]

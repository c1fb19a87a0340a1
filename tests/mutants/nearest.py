"""Which files of tests come first for a file of the package: those named after it, of its room, and near by imports."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

UNHELPFUL = ("house", "docs", "examples", "mutants", "faults")  # of the source as text, of pages, or of these tools
FAR = 99


@dataclass(frozen=True)
class Neighbourhood:
    """The files of a package and of its tests, with what they import of each other."""

    package: Path  # src/shardwright
    tests: Path

    def nearest(self, file: str, most: int = 12) -> list[str]:
        """Files of tests for a file of the package, the nearest first, relative to the folder of tests."""
        module = _module(Path(self.package.name) / file)
        away = self._distances(module)
        stem, room = Path(file).stem, Path(file).parts[0]

        def key(test: Path) -> tuple[bool, bool, int, int]:
            of_room = room in test.relative_to(self.tests).parts[:-1]
            words = test.stem.removeprefix("test_")
            named = words in (stem, f"{stem}s", stem.rstrip("s")) or (of_room and words in stem)
            return not named, not of_room, away.get(self._name(test), FAR), test.stat().st_size

        near = [test for test in self._tests if key(test)[2] < FAR]
        return [str(test.relative_to(self.tests)) for test in sorted(near, key=key)[:most]]

    @cached_property
    def _tests(self) -> list[Path]:
        return [
            test
            for test in sorted(self.tests.rglob("test_*.py"))
            if test.relative_to(self.tests).parts[0] not in UNHELPFUL
        ]

    @cached_property
    def _imports(self) -> Mapping[str, frozenset[str]]:
        """What every module of the package and of the tests imports."""
        roots = [(self.package.parent, path) for path in self.package.rglob("*.py")]
        roots += [(self.tests.parent, path) for path in self.tests.rglob("*.py")]
        named = {_module(path.relative_to(root)): path for root, path in roots}
        return {name: _imported(name, path, frozenset(named)) for name, path in named.items()}

    def _name(self, test: Path) -> str:
        return _module(test.relative_to(self.tests.parent))

    def _distances(self, module: str) -> dict[str, int]:
        """How many imports each module is away from one."""
        importers: dict[str, set[str]] = {}
        for name, imported in self._imports.items():
            for other in imported:
                importers.setdefault(other, set()).add(name)
        away, edge = {module: 0}, [module]
        while edge:
            edge = [name for other in edge for name in importers.get(other, ()) if name not in away]
            step = max(away.values()) + 1
            away.update(dict.fromkeys(edge, step))
        return away


def _module(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, path: Path, known: frozenset[str]) -> frozenset[str]:
    """The known modules that a file imports; a name of a module stands for the module."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            base = ".".join(parts[: len(parts) - node.level + 1]) if node.level else ""
            origin = ".".join(value for value in (base, node.module) if value)
            names += [origin, *(f"{origin}.{alias.name}" for alias in node.names)]
    return frozenset(name for name in names if name in known)

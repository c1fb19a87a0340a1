"""Names say what a thing is: a class name is defined once, no name is empty, files that docs name exist."""

import ast
import re
from collections import defaultdict
from pathlib import Path

import pytest

from .source import SRC, files, nodes

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
EMPTY = frozenset("held found made said one given asked".split())
"""Names that say nothing to someone who has not read the file."""


def classes(root: Path) -> dict[str, list[str]]:
    """The files that define each class name, once for each definition."""
    places = defaultdict(list)
    for path in files(root):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(str(path.relative_to(root)))
    return places


def empty_names(path: Path) -> list[str]:
    """Bindings of a file that are called by an empty name, with their lines."""
    bindings = []
    for node in nodes(path):
        name = None
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            name = node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.arg):
            name = node.arg
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        if name is not None and name.strip("_").lower() in EMPTY:
            bindings.append(f"{path.name}:{node.lineno} {name}")
    return bindings


@pytest.mark.parametrize("folder", ["src", "tests", "bench", "examples"])
def test_no_name_is_empty(folder):
    assert sorted(name for path in files(ROOT / folder) for name in empty_names(path)) == []


def test_a_class_name_is_defined_once():
    assert {name: places for name, places in classes(SRC).items() if len(places) > 1} == {}


def test_a_class_that_is_defined_twice_is_found(tmp_path):
    (tmp_path / "a.py").write_text("class Step:\n    pass\n")
    (tmp_path / "b.py").write_text("class Step:\n    pass\n")
    assert classes(tmp_path)["Step"] == ["a.py", "b.py"]


def test_an_empty_name_is_found(tmp_path):
    (tmp_path / "a.py").write_text("def f(held):\n    for one in held:\n        self.made = one\n")
    assert len(empty_names(tmp_path / "a.py")) == 3


@pytest.mark.parametrize("page", DOCS, ids=lambda page: page.name)
def test_files_that_a_page_names_exist(page):
    text = page.read_text(encoding="utf-8")
    folders, kinds = "docs|tests|bench|examples|src/shardwright", "py|md|yaml|sh|json"
    named = set(re.findall(rf"(?<![\w/.-])((?:{folders})/[\w./-]+\.(?:{kinds}))(?!\.?\w)", text))
    named |= {f"src/shardwright/{name}" for name in re.findall(r"`([a-z_]+/[\w/]+\.py)`", text)}
    new = set(re.findall(r"[Nn]ew file `([\w/.]+)`", text))  # which a recipe creates
    named -= new | {f"src/shardwright/{name}" for name in new}
    missing = [
        name
        for name in named
        if not (ROOT / name).exists() and not (ROOT / name.removeprefix("src/shardwright/")).exists()
    ]
    assert missing == []


PACKAGES = [path for path in files(SRC) if path.name == "__init__.py"]


@pytest.mark.parametrize("package", PACKAGES, ids=lambda path: str(path.parent.relative_to(SRC.parent)))
def test_a_package_says_what_happens_in_it_and_in_which_order_to_read_it(package):
    docstring = ast.get_docstring(ast.parse(package.read_text(encoding="utf-8"))) or ""
    named = re.findall(r"`(\w+\.py|\w+/)`", docstring)
    assert [name for name in named if not (package.parent / name).exists()] == []
    others = [path for path in package.parent.glob("*.py") if path.name not in ("__init__.py", "__main__.py")]
    assert package.parent == SRC or len(named) >= min(2, len(others))

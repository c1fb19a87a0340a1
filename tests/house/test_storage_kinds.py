"""What depends on how a parameter is stored, its storage says. The few files that name a kind have a reason each."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

from .source import SRC, files

REMEDY = "an error message that names a plan to use instead"

ALLOWED = {
    "plan/strings.py": (6, "words of other libraries, answered with ours"),
    "cli/arguments.py": (1, "help that names the plans which are verified by default"),
    "doctor/checks.py": (4, "the plans that are tried, one of each kind"),
    "huggingface/refused.py": (2, REMEDY),
    "runtime/model/wrappers.py": (4, REMEDY),
    "runtime/parameters/hooks.py": (1, REMEDY),
    "runtime/parameters/zero3.py": (1, REMEDY),
    "verify/parity.py": (1, "the plans that are verified by default"),
    "wrapping.py": (1, REMEDY),
}
"""Files that name kinds of storage, how often, and why."""

KIND = re.compile(r"\b[Zz]ero[123]\b")
LEVELS = ("level", "levels", "symbol", "zero_level")


@lru_cache
def kind_tests(root: Path) -> dict[str, int]:
    """How often files outside of `storage/` name a kind of storage, or compare a level; docstrings are left out."""
    counts: dict[str, int] = {}
    for path in files(root):
        name = str(path.relative_to(root))
        if not name.startswith("storage/"):
            count = _count(ast.parse(path.read_text(encoding="utf-8")))
            counts |= {name: count} if count else {}
    return counts


def _count(tree: ast.Module) -> int:
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    count = 0
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            count += any(_name(side) in LEVELS for side in (node.left, *node.comparators))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs:
            count += KIND.search(node.value) is not None
        elif isinstance(node, ast.Name | ast.Attribute):
            count += KIND.fullmatch(_name(node)) is not None
    return count


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def test_kinds_of_storage_are_named_where_they_are_defined_and_in_few_other_places():
    more = {name: count for name, count in kind_tests(SRC).items() if count > ALLOWED.get(name, (0, ""))[0]}
    assert more == {}, "what these files ask is a question to a storage (storage/storage.py)"


def test_what_is_allowed_is_still_there():
    counts = kind_tests(SRC)
    assert {name: counts.get(name, 0) for name in ALLOWED} == {name: count for name, (count, _) in ALLOWED.items()}


def test_a_test_of_a_level_is_found(tmp_path):
    (tmp_path / "cost.py").write_text(
        '"""zero3"""\nif parameter.level == 3 or 2 <= level or policy == "zero1" or isinstance(kind, Zero2): ...\n'
    )
    (tmp_path / "storage").mkdir()
    (tmp_path / "storage" / "zero3.py").write_text('name = "zero3"\n')
    assert kind_tests(tmp_path) == {"cost.py": 4}

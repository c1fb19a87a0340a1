"""Files stay under 400 lines and functions under 60: past that, a noun is hiding in them."""

import ast
from pathlib import Path

from .source import SRC, files, nodes

FILE_LINES = 400
FUNCTION_LINES = 60

# What may be longer, with the reason. Keep it short: "lower/passes.py" or "lower/passes.py:fuse".
ALLOWED: dict[str, str] = {}


def too_long(root: Path) -> dict[str, int]:
    """The files and functions below root that are too long, and how long they are."""
    lengths = {}
    for path in files(root):
        name, text = str(path.relative_to(root)), path.read_text(encoding="utf-8")
        if (lines := len(text.splitlines())) > FILE_LINES:
            lengths[name] = lines
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                if (lines := (node.end_lineno or first) - first + 1) > FUNCTION_LINES:
                    lengths[f"{name}:{node.name}"] = lines
    return lengths


def test_nothing_is_too_long():
    assert {name: lines for name, lines in too_long(SRC).items() if name not in ALLOWED} == {}


def test_the_allowed_are_still_too_long():
    assert set(ALLOWED) <= set(too_long(SRC))


def test_a_long_file_and_a_long_function_are_found(tmp_path):
    (tmp_path / "long.py").write_text("x = 1\n" * (FILE_LINES + 1))
    (tmp_path / "function.py").write_text("def f():\n" + "    x = 1\n" * FUNCTION_LINES)
    (tmp_path / "short.py").write_text("def g():\n" + "    x = 1\n" * (FUNCTION_LINES - 1))
    assert too_long(tmp_path) == {"function.py:f": FUNCTION_LINES + 1, "long.py": FILE_LINES + 1}

"""The tool finds a mutant that tests notice, one that they do not, and one that hangs, in a package of a few lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants.__main__ import changes_of, drawn, summary
from tests.mutants.changes import mutants
from tests.mutants.nearest import Neighbourhood
from tests.mutants.trial import Lab, Verdict

PACKAGE = '''"""A toy."""


def least(a: int, b: int) -> int:
    """Tested, but not for what is equal."""
    return a if a < b else b


def total(numbers: list[int]) -> int:
    """Tested."""
    found = 0
    while numbers:
        found += numbers.pop()
    if found < -100:
        raise ValueError(f"{found + 1} is too little")
    return found


def sums(left: list[int], right: list[int]) -> list[int]:
    return [a + b for a, b in zip(left, right, strict=True)]
'''
TESTS = """from toy.room.sums import least, total

def test_least():
    assert (least(1, 2), least(2, 1)) == (1, 1)

def test_total():
    assert total([1, 2]) == 3

def test_that_fails_in_any_case():
    assert total([]) == 1
"""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for file, text in {"src/toy/__init__.py": "", "src/toy/room/__init__.py": "", "src/toy/room/sums.py": PACKAGE,
                       "tests/__init__.py": "", "tests/test_other.py": "def test_nothing():\n    pass\n",
                       "tests/test_sums.py": TESTS, "pyproject.toml": ""}.items():  # fmt: skip
        (tmp_path / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "tree" / file).write_text(text)
    return tmp_path / "tree"


def test_every_kind_of_change_is_made_and_messages_are_left_alone(tree: Path) -> None:
    shown = {str(mutant).split(" ", 1)[1] for mutant in mutants(tree / "src" / "toy", "room/sums.py")}
    assert shown == {
        "flip comparison: `a < b` -> `(a <= b)`",
        "drop returned: `return a if a < b else b` -> `return None`",
        "change constant: `0` -> `(1)`",
        "remove statement: `found += numbers.pop()` -> `pass`",
        "flip comparison: `found < -100` -> `(found <= -100)`",
        "drop not: `-100` -> `(100)`",
        "change constant: `100` -> `(101)`",
        'remove statement: `if found < -100: raise ValueError(f"{found + 1} is too little")` -> `pass`',
        'remove statement: `raise ValueError(f"{found + 1} is too little")` -> `pass`',
        "drop returned: `return found` -> `return None`",
        "drop returned: `return [a + b for a, b in zip(left, right, strict=True)]` -> `return None`",
        "flip arithmetic: `a + b` -> `(a - b)`",
        "drop argument: `zip(left, right, strict=True)` -> `(zip(left, strict=True))`",
    }


def test_the_nearest_tests_are_those_that_import_the_file(tree: Path) -> None:
    assert Neighbourhood(tree / "src" / "toy", tree / "tests").nearest("room/sums.py") == ["test_sums.py"]


def test_what_is_caught_survives_or_hangs_is_told_apart(tree: Path, tmp_path: Path) -> None:
    near = Neighbourhood(tree / "src" / "toy", tree / "tests")
    wanted = ("a <= b", "found += numbers.pop()", "change constant: `0`")
    chosen = [c for c in changes_of(drawn(near.package, ["room"], 0), near, 3) if any(w in c.name for w in wanted)]
    verdicts: list[Verdict] = []

    lab = Lab(tree=tree, scratch=tmp_path / "scratch", each=20.0, one_test=3.0)
    lab.run(chosen, verdicts.append)

    outcomes = {verdict.name.split(": ", 1)[1]: (verdict.outcome, verdict.test) for verdict in verdicts}
    assert outcomes == {
        "`a < b` -> `(a <= b)`": ("survived", ""),
        "`0` -> `(1)`": ("caught", "tests/test_sums.py::test_total"),
        "`found += numbers.pop()` -> `pass`": ("timed out", "tests/test_sums.py::test_total"),
    }
    assert "3 mutants: 2 caught (66.7%; 1 of them by a time limit), 1 survived" in summary(verdicts)
    assert (tree / "src/toy/room/sums.py").read_text() == PACKAGE

"""Reads the recipes of CONTRIBUTING.md and carries them out.

A recipe is a section `### Add ...`. Its blocks are what a contributor does, in order:

    a line that names a `path`, then a block     a new file, or lines at the end of one that exists
    a line that names a `path`, then a diff      lines of the file that become others; each hunk must fit in one place
    a block of sh                                 commands that must succeed at the root of the repository
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "CONTRIBUTING.md"
COPIED = ("src", "tests", "bench", "docs", "examples", "pyproject.toml", "README.md", "CONTRIBUTING.md")

_SECTION = re.compile(r"^### (Add .*?)\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_BLOCK = re.compile(r"^(?P<above>[^\n]*)\n\n?```(?P<language>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Edit:
    """A block of code, and the file that it goes to."""

    path: str
    text: str
    diff: bool = False

    def apply(self, root: Path) -> None:
        file = root / self.path
        before = file.read_text() if file.exists() else ""
        file.parent.mkdir(parents=True, exist_ok=True)
        if not self.diff:
            file.write_text(before + ("\n\n" if before else "") + self.text)
            return
        for hunk in re.split(r"^@@.*\n", self.text, flags=re.MULTILINE):
            if hunk.strip():
                before = self._with_hunk(before, hunk.splitlines())
        file.write_text(before)

    def _with_hunk(self, text: str, lines: list[str]) -> str:
        old, new = ("\n".join(line[1:] for line in lines if line[:1] != skip) + "\n" for skip in "+-")
        assert text.count(old) == 1, f"{self.path} has these lines {text.count(old)} times:\n{old}"
        return text.replace(old, new)


@dataclass(frozen=True)
class Recipe:
    """What a contributor changes, and the commands that show that it is right."""

    title: str
    edits: tuple[Edit, ...]
    commands: tuple[str, ...]


def debugging() -> list[str]:
    """The Python of the section about debugging."""
    section = PAGE.read_text().split("## Debugging")[1].split("\n## ")[0]
    return [block["text"] for block in _BLOCK.finditer(section) if block["language"] == "python"]


def recipes() -> dict[str, Recipe]:
    """All recipes by title."""
    return {title: _recipe(title, text) for title, text in _SECTION.findall(PAGE.read_text())}


def _recipe(title: str, text: str) -> Recipe:
    edits, commands = [], []
    for block in _BLOCK.finditer(text):
        path = re.findall(r"`([\w/.-]+\.(?:py|md|yaml))`", block["above"])
        if block["language"] == "sh":
            commands += [line for line in block["text"].splitlines() if line.strip()]
        elif block["language"] in ("python", "diff", "markdown"):
            assert path, f"{title}: no file is named above\n{block['text']}"
            edits.append(Edit(path[-1], block["text"], block["language"] == "diff"))
    return Recipe(title, tuple(edits), tuple(commands))


def scratch_copy(folder: Path) -> Path:
    """A copy of the repository without its history."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
        else:
            shutil.copy(source, folder / name)
    return folder


def run(command: str, root: Path) -> subprocess.CompletedProcess[str]:
    """Run a command of a recipe with this Python, on the scratch copy alone."""
    words = command.split()
    assert words[:2] == ["python", "-m"], f"a recipe runs Python modules only: {command}"
    environment = {"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{root / 'src'}:{root}", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, *words[1:]], cwd=root, env=environment, capture_output=True, text=True, timeout=600
    )

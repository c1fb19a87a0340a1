"""A fault: one line of the package changed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "src" / "shardwright"


@dataclass(frozen=True)
class Fault:
    """What is wrong, in which file, the text there and what takes its place, and a test that notices it."""

    what: str
    file: str
    before: str
    after: str
    test: str = ""  # below tests/; none: the check of generated code notices it

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"

    @property
    def text(self) -> str:
        """The file after it."""
        return (PACKAGE / self.file).read_text(encoding="utf-8").replace(self.before, self.after)

    @property
    def count(self) -> int:
        """How often the text is in the file: once, or the fault does not apply any more."""
        return (PACKAGE / self.file).read_text(encoding="utf-8").count(self.before)

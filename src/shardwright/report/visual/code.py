"""The user's source beside the generated code, and which lines of the one became which of the other.

Generated lines say in their comments which line of the model they come from; a line without such a comment belongs to
the one before it. Of the model's files only the lines around those that ops come from are taken.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ...emit import emit
from ...ir import Graph
from ...ir.graph import SourceLine
from ...lower import LoweredProgram

AROUND = 3  # lines that are shown around those that ops come from
GAP = 12  # a shorter gap is shown too
LONGEST = 400  # characters of a line
_PLACE = re.compile(r"#.*?([\w.-]+\.py:\d+)")


def code_of(graph: Graph, programs: Sequence[LoweredProgram]) -> dict[str, Any]:
    """Excerpts of the model's files, and each generated file with the source of its lines."""
    lines = {str(op.source): op.source for op in graph.ops if op.source is not None}
    files: dict[str, list[SourceLine]] = {}
    for source in lines.values():
        files.setdefault(source.file, []).append(source)
    names = _file_names(files)
    return {
        "sources": [
            {"file": names[path], "runs": list(_excerpts(path, sorted({source.line for source in known})))}
            for path, known in files.items()
        ],
        "generated": [
            {"title": program.title or "generated code", "lines": list(_generated(emit(program).text, lines, files))}
            for program in programs
        ],
    }


def _file_names(paths: Iterable[str]) -> dict[str, str]:
    """Short names of files, with the folder where two are called alike."""
    short: dict[str, list[str]] = {}
    for path in paths:
        short.setdefault(path.rsplit("/", 1)[-1], []).append(path)
    return {
        path: name if len(alike) == 1 else "/".join(path.rsplit("/", 2)[-2:])
        for name, alike in short.items()
        for path in alike
    }


def _excerpts(path: str, wanted: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Runs of lines of a file around the wanted ones."""
    text = linecache.getlines(path)
    if not text or not wanted:
        return
    runs: list[list[int]] = []
    for number in wanted:
        if runs and number - runs[-1][1] <= GAP + 2 * AROUND:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    for first, last in runs:
        start, end = max(1, first - AROUND), min(len(text), last + AROUND)
        yield {"first": start, "lines": [line.rstrip("\n")[:LONGEST] for line in text[start - 1 : end]]}


def _generated(text: str, lines: dict[str, SourceLine], files: Iterable[str]) -> Iterator[list[Any]]:
    """Each line with the file (by its place in `sources`) and the line that it comes from, if it comes from one."""
    numbers = {path: number for number, path in enumerate(files)}
    current: SourceLine | None = None
    for line in text.splitlines():
        code = line.strip()
        match = _PLACE.search(line)
        if match is not None and match[1] in lines:
            current = lines[match[1]]
        elif not line.startswith("        ") or code.startswith(("def ", "return ", "for ", "with ")):
            current = None
        yield [line[:LONGEST]] if current is None or not code else [line[:LONGEST], numbers[current.file], current.line]

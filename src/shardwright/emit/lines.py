"""Lines that fit: a generated file is for reading, so nothing runs off the page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

WIDTH = 120
COMMENT = "  # "


def narrowed(line: str) -> list[str]:
    """A line that is too long has its comment above it, and its arguments on lines of their own if need be."""
    if len(line) <= WIDTH:
        return [line]
    mark = next((at for at, _ in _outside_of_strings(line) if line.startswith(COMMENT, at)), len(line))
    code, comment = line[:mark], line[mark + len(COMMENT) :]
    pad = code[: len(code) - len(code.lstrip())]
    above = [f"{pad}# {comment.strip()}"] if comment else []
    if len(code) <= WIDTH or not code.endswith((")", "),", "],")):
        return [*above, code]
    head, items, tail = _arguments(code)
    if len(items) == 1 and head.endswith((" (", "((", "=(")):
        return [*above, code]  # brackets around an expression: with a comma in them they would be a tuple
    lines = [*above, head]
    for item in items:
        if lines[-1] != head and len(lines[-1]) + len(item) + 2 <= WIDTH:
            lines[-1] += f" {item},"
        else:
            lines += narrowed(f"{pad}    {item},")  # a list may be too long in turn
    return [*lines, f"{pad}{tail}"]


def _arguments(code: str) -> tuple[str, list[str], str]:
    """The last call of a line: what stands before its arguments, the arguments, and what closes it."""
    tail = code[-2:] if code.endswith(",") else code[-1]
    end = len(code) - len(tail)
    opened: list[list[int]] = []  # for each open bracket where it stands, and the commas directly in it
    for at, sign in _outside_of_strings(code):
        if at == end:
            break
        if sign in "([{":
            opened.append([at])
        elif sign in ")]}":
            opened.pop()
        elif sign == "," and opened:
            opened[-1].append(at)
    bounds = [*opened[-1], end]
    items = [code[start + 1 : stop].strip() for start, stop in pairwise(bounds)]
    return code[: bounds[0] + 1], items if items[-1] else items[:-1], tail


def _outside_of_strings(code: str) -> Iterator[tuple[int, str]]:
    """The characters of a line with their places, but for those of its strings."""
    quote = ""
    skip = False
    for at, sign in enumerate(code):
        if skip:
            skip = False
        elif quote:
            skip = sign == "\\"
            quote = "" if sign == quote else quote
        elif sign in "\"'":
            quote = sign
        else:
            yield at, sign

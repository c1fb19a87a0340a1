"""Lines that fit: a generated file is for reading, so nothing runs off the page."""

from __future__ import annotations

WIDTH = 120
BRACKETS = {")": 1, "]": 1, "}": 1, "(": -1, "[": -1, "{": -1}


def narrowed(line: str) -> list[str]:
    """A line that is too long has its comment above it, and its arguments on lines of their own if need be."""
    if len(line) <= WIDTH:
        return [line]
    code, mark, comment = line.partition("  # ")
    pad = code[: len(code) - len(code.lstrip())]
    above = [f"{pad}# {comment.strip()}"] if mark else []
    if len(code) <= WIDTH or not code.endswith((")", "),")):
        return [*above, code]
    head, items, tail = _arguments(code)
    lines = [*above, head]
    for item in items:
        if lines[-1] != head and len(lines[-1]) + len(item) + 2 <= WIDTH:
            lines[-1] += f" {item},"
        else:
            lines.append(f"{pad}    {item},")
    return [*lines, f"{pad}{tail}"]


def _arguments(code: str) -> tuple[str, list[str], str]:
    """The last call of a line: what stands before its arguments, the arguments, and what closes it."""
    tail = ")," if code.endswith("),") else ")"
    depth, at = 0, len(code) - len(tail)
    for at in range(len(code) - len(tail), -1, -1):
        depth += BRACKETS.get(code[at], 0)
        if depth == 0:
            break
    inside, items, start = code[at + 1 : len(code) - len(tail)], [], 0
    for here, sign in enumerate(inside):
        depth += BRACKETS.get(sign, 0)
        if sign == "," and depth == 0:
            items.append(inside[start:here].strip())
            start = here + 1
    return code[: at + 1], [*items, inside[start:].strip()], tail

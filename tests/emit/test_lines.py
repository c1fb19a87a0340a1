"""Lines that are too long are wrapped, and mean what they meant."""

import ast

import pytest

from shardwright.emit.lines import WIDTH, narrowed

NAMES = ", ".join(f"a_rather_long_name_{number}" for number in range(8))


@pytest.mark.parametrize(
    "call",
    [
        f"x = torch.einsum(\"td,dnh->tnh\", {NAMES})",
        f"x = f(g(a, b), (1, 2), {NAMES}, [3], k={{'a': 1}})",
        f"x = f({NAMES}, \"a) b, (c\", 'd,e')",
        f"x = f({NAMES}, \"with  # a sign and a \\\" quote\")",
        f"x = f(\"a,b\")(g, {NAMES})",
        f"x = f(1, tied=({NAMES},),)",
        f"x = f(1, tied=({NAMES}, {NAMES},),)",
    ],
)  # fmt: skip
def test_a_wrapped_call_is_the_same_call(call):
    lines = narrowed("    " + call + "  # [b, S, D]  model.py:3")
    assert lines[0] == "    # [b, S, D]  model.py:3"
    assert len(lines) > 2 and all(len(line) <= WIDTH for line in lines)
    assert ast.dump(ast.parse("\n".join(lines)[len(lines[0]) :].strip())) == ast.dump(ast.parse(call))


def test_a_short_line_stays_as_it_is():
    assert narrowed("    x = f(y)  # [b, S]") == ["    x = f(y)  # [b, S]"]


def test_a_long_line_that_is_no_call_only_loses_its_comment():
    line = "    " + " + ".join(NAMES.split(", "))
    assert narrowed(line + "  # a sum") == ["    # a sum", line]


def test_brackets_around_an_expression_stay_an_expression():
    line = f"x = ({' + '.join(NAMES.split(', '))})"
    assert narrowed(line) == [line]

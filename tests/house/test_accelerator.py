"""No kind of accelerator is named outside of `runtime/accelerator.py`, so that none is left out elsewhere."""

import ast
import re

import pytest

from .source import SRC, files

THE_PLACE = "runtime/accelerator.py"
# Names of methods and attributes of tensors, which stay what they are.
OF_TENSORS = {
    "runtime/model/methods.py",
    "runtime/parameters/stage_numbers.py",
    "runtime/parameters/replaced.py",
    "runtime/parameters/local_ops.py",
}
KINDS = re.compile(r"(?<![a-z])(cuda|nccl|xpu|hip|mps)(?![a-z])")


def kinds_named(text: str) -> list[tuple[int, str]]:
    """Lines and kinds of accelerators in code: attributes, names and strings, but not comments or docstrings."""
    tree = ast.parse(text)
    prose = {
        id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    kinds = []
    for node in ast.walk(tree):
        words = ""
        if isinstance(node, ast.Attribute):
            words = node.attr
        elif isinstance(node, ast.Name):
            words = node.id
        elif isinstance(node, ast.alias):
            words = node.name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in prose:
            words = node.value
        kinds += [(node.lineno, match.group()) for match in KINDS.finditer(words)]
    return kinds


def test_one_file_names_kinds_of_accelerators():
    faults = [
        f"{path.relative_to(SRC)}:{line} {kind}"
        for path in files(SRC)
        if str(path.relative_to(SRC)) not in OF_TENSORS | {THE_PLACE}
        for line, kind in kinds_named(path.read_text(encoding="utf-8"))
    ]
    assert faults == []
    assert kinds_named((SRC / THE_PLACE).read_text(encoding="utf-8"))


@pytest.mark.parametrize(
    "line", ["torch.cuda.synchronize()", 'x.to("cuda:0")', "from torch import cuda", 'backend = f"cpu:gloo,{x}:nccl"']
)
def test_a_kind_in_code_is_noticed(line):
    assert len(kinds_named(line)) == 1


def test_prose_may_name_kinds():
    assert kinds_named('"""On cuda."""\nx = 1  # as nccl does') == []

"""No package uses the private attributes of another: what is shared has a public name."""

import ast
from collections import defaultdict
from pathlib import Path

import torch
from torch import nn

from .source import SRC, files, nodes

# Names that torch and Python define too: `module._parameters` is not ours.
FOREIGN = {name for kind in (nn.Module, nn.Module(), torch.Tensor, torch.optim.Optimizer) for name in dir(kind)}


def package(path: Path, root: Path) -> str:
    """The folder that a file is in; a file beside the folders is a package of its own."""
    inner = path.relative_to(root)
    return str(inner.parent) if len(inner.parts) > 1 else inner.stem


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


def defined(tree: ast.AST) -> set[str]:
    """The private attributes that classes of a file define: methods, fields, and what is assigned to self."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for item in node.body:
                if isinstance(item, ast.FunctionDef):
                    names.add(item.name)
                elif isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name):
                    names.add(item.target.id)
                elif isinstance(item, ast.Assign):
                    names |= {target.id for target in item.targets if isinstance(target, ast.Name)}
    return {name for name in names if is_private(name)}


def is_own(value: ast.expr) -> bool:
    if isinstance(value, ast.Call):
        return isinstance(value.func, ast.Name) and value.func.id == "super"
    return isinstance(value, ast.Name) and value.id in ("self", "cls")


def borrowed(root: Path) -> list[str]:
    """Uses of a private attribute that only other packages define."""
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files(root)}
    owners = defaultdict(set)
    for path, tree in trees.items():
        for name in defined(tree) - FOREIGN:
            owners[name].add(package(path, root))
    uses = []
    for path, tree in trees.items():
        modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or is_own(node.value) or ast.unparse(node.value) in modules:
                continue
            if node.attr in owners and package(path, root) not in owners[node.attr]:
                uses.append(f"{path.relative_to(root)}:{node.lineno} uses .{node.attr} of {owners[node.attr]}")
    return uses


def private_imports(root: Path) -> list[str]:
    """Imports of a private name from another package of ours."""
    uses = []
    for path in files(root):
        for node in nodes(path):
            inside = isinstance(node, ast.ImportFrom) and (node.level or (node.module or "").startswith("shardwright"))
            if inside and (node.level != 1 or node.module is None or "." in node.module):
                names = [alias.name for alias in node.names if is_private(alias.name)]
                uses += [f"{path.relative_to(root)}:{node.lineno} imports {name}" for name in names]
    return uses


def test_no_package_uses_private_attributes_of_another():
    assert borrowed(SRC) == []


def test_no_package_imports_private_names_of_another():
    assert private_imports(SRC) == []


def test_a_borrowed_attribute_is_found(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
    (tmp_path / "a/model.py").write_text("class Model:\n    def __init__(self):\n        self._state = 1\n")
    (tmp_path / "a/other.py").write_text("def f(model):\n    return model._state\n")
    (tmp_path / "b/user.py").write_text("def f(model):\n    return model._state\n")
    assert borrowed(tmp_path) == ["b/user.py:2 uses ._state of {'a'}"]


def test_a_private_import_is_found(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b/user.py").write_text("from ..a.model import _state\nfrom .own import _fine\n")
    assert private_imports(tmp_path) == ["b/user.py:1 imports _state"]

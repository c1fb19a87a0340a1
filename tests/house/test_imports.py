"""Each package imports only the packages that the design allows, and torch only where it is needed."""

from pathlib import Path

import pytest

from .source import SRC, Import, imports

# The order of docs/design.md: every package with all it may import of ours, in the order data goes through them.
MAY_IMPORT = {
    "errors": "",
    "batch_dim": "",
    "frozen_values": "",
    "formats": "errors",
    "precision": "errors",
    "options": "errors",
    "layout": "errors",
    "control_flow": "",
    "reshard": "errors layout",
    "schedule": "errors layout",
    "ir": "errors layout",
    "storage": "errors layout",
    "python_files": "errors",
    "rules": "errors layout storage reshard ir",
    "cluster": "errors formats layout",
    "ops": "errors layout ir rules cluster",
    "capture": "errors batch_dim frozen_values precision layout control_flow ir rules ops",
    "cost": "errors layout storage reshard schedule ir rules cluster ops",
    "lower": "errors layout storage reshard ir rules ops cost",
    "memory": "errors layout storage schedule ir rules ops cost lower",
    "plan": "errors formats python_files layout storage reshard schedule ir rules cluster ops cost lower memory",
    "policy": "plan",
    "probe": "errors layout ir rules ops capture lower",
    "emit": "errors layout storage schedule ir rules ops lower",
    "runtime": "errors batch_dim frozen_values layout storage control_flow schedule",
    "wrapping": "errors runtime",
    "planning": "errors precision schedule ir rules capture cluster cost plan runtime",
    "compile": (
        "errors formats options batch_dim frozen_values precision layout storage reshard schedule ir rules capture "
        "cluster cost plan lower probe emit runtime planning"
    ),
    "verify": (
        "errors options precision layout storage reshard ir rules ops capture cluster cost plan lower probe emit "
        "runtime planning compile wrapping"
    ),
    "rehearse": (
        "errors options precision layout storage schedule ir rules ops capture plan lower probe runtime planning "
        "compile verify"
    ),
    "compiled_parts": "errors options layout storage capture plan lower runtime planning compile",
    "parallelize": (
        "errors options precision layout reshard ir rules ops capture cluster cost plan lower probe emit runtime "
        "planning compile compiled_parts verify wrapping calibrate"
    ),
    "checkpoint": "errors formats runtime",
    "ema": "errors runtime",
    "initialization": "errors capture runtime",
    "data": "errors runtime",
    "calibrate": "errors formats layout cluster runtime",
    "doctor": "errors capture runtime verify parallelize",
    "register": "errors ir rules ops capture probe runtime verify",
    "report": (
        "errors formats layout storage reshard schedule ir rules cluster cost plan lower memory probe emit planning "
        "verify"
    ),
    "train": (
        "errors formats options cluster cost ir plan precision planning compile runtime verify parallelize checkpoint "
        "data ema report"
    ),
    "lightning": "errors options plan runtime planning compile compiled_parts parallelize checkpoint",
    "huggingface": "errors plan runtime parallelize checkpoint",
    "cli": (
        "errors formats options python_files batch_dim precision schedule ir capture cluster calibrate doctor plan "
        "lower emit runtime planning compile verify rehearse parallelize checkpoint report train"
    ),
}
NO_TORCH = frozenset(
    "errors formats batch_dim options precision python_files layout storage reshard schedule ir rules ops cluster cost "
    "lower memory plan policy emit".split()
)


IN_A_NOTEBOOK = ("plan/plan.py", "shardwright.report")
"""A plan shows itself as its report, which is made where a notebook calls for it."""


def is_torch(target: str) -> bool:
    return target.split(".")[0] == "torch"


def may_use_torch(imported: Import) -> bool:
    return imported.package not in NO_TORCH


def wrong(root: Path) -> list[str]:
    faults = []
    for imported in imports(root):
        if imported.package in ("__init__", "__main__"):  # the facade names what the packages have
            continue
        inside = imported.of in (None, imported.package, "__version__")
        inside = inside or (str(imported.file), imported.target) == IN_A_NOTEBOOK
        if not inside and imported.of not in MAY_IMPORT.get(imported.package, "").split():
            faults.append(str(imported))
        if is_torch(imported.target) and not may_use_torch(imported):
            faults.append(str(imported))
    return faults


def test_the_packages_keep_their_order():
    assert wrong(SRC) == []


def test_every_package_is_in_the_table():
    packages = {path.name.removesuffix(".py") for path in SRC.iterdir() if path.suffix == ".py" or path.is_dir()}
    assert packages - {"__init__", "__main__", "__pycache__"} <= set(MAY_IMPORT)


GUESTS = {
    "lightning": ["lightning"],
    "torchmetrics": ["lightning"],
    "transformers": ["huggingface", "cli"],
    "accelerate": ["huggingface"],
    "jsonargparse": ["cli"],  # which takes time to import, and is needed on a command line only
}


def test_optional_dependencies_are_imported_by_their_packages_alone():
    """And no package may import those, so that import shardwright needs none of them."""
    for imported in imports(SRC):
        packages = GUESTS.get(imported.target.split(".")[0])
        assert packages is None or imported.package in packages, str(imported)
    assert not any({"lightning", "huggingface"} & set(allowed.split()) for allowed in MAY_IMPORT.values())


def test_no_two_packages_import_each_other():
    for package, allowed in MAY_IMPORT.items():
        for other in allowed.split():
            assert package not in MAY_IMPORT[other].split(), f"{package} and {other}"


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ir/graph.py", "from shardwright.plan import Plan"),
        ("ir/graph.py", "from ..plan.plan import Plan"),
        ("ir/graph.py", "from .. import plan"),
        ("ir/deep/graph.py", "from ...plan import Plan"),
        ("layout.py", "from . import ir"),
        ("layout.py", "import shardwright.ir.graph"),
        ("layout.py", "from shardwright import ir"),
        ("runtime/groups.py", "def f():\n    from ..rules import Rule"),
        ("plan/plan.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch.nn"),
        ("rules/linear.py", "from torch import Tensor"),
        ("unheard_of.py", "from .layout import Layout"),
    ],
)
def test_a_wrong_import_is_found(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line + "\n")
    assert len(wrong(tmp_path)) == 1


@pytest.mark.parametrize(
    ("file", "line"),
    [
        ("ir/graph.py", "from ..layout import Layout"),
        ("ir/graph.py", "from .text import show"),
        ("ir/graph.py", "from shardwright import layout"),
        ("probe/search.py", "import torch"),
        ("runtime/groups.py", "import torch.distributed as dist"),
        ("lower/passes.py", "from ..reshard import steps"),
        ("emit/text.py", "import torchless"),
    ],
)
def test_a_right_import_is_not_a_fault(tmp_path, file, line):
    (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / file).write_text(line + "\n")
    assert wrong(tmp_path) == []

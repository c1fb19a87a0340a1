"""A new kind of storage is a file in `storage/` and its line in the list there: plans, prices, code, runtime follow.

The kind that is added keeps what the optimizer updates, with its state, in the memory of the host. A process of its
own runs `tests/storage/offloaded.py` with a copy of the package that has it.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

OFFLOADED = '''
"""ZeRO-2 with the updated shard, its gradient and the optimizer state in the memory of the host."""

from .storage import StoredElements
from .zero2 import Zero2


class Offloaded(Zero2):
    """The gradient's share goes to the host, and the updated share of the parameter back."""

    name = symbol = "offload"
    title = "ZeRO-2 on the host"
    shard_device = "cpu"
    update_copies = 2

    def stored(self, count: float, parts: int) -> StoredElements:
        return super().stored(count, parts)._replace(gradient=0.0, state=0.0)
'''


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """What the checks say that ran with a copy of the package that has one more kind."""
    folder = tmp_path_factory.mktemp("scratch")
    source = folder / "src"
    shutil.copytree(ROOT / "src", source, ignore=shutil.ignore_patterns("__pycache__"))
    storage = source / "shardwright" / "storage"
    (storage / "offloaded.py").write_text(OFFLOADED)
    listed = (storage / "kinds.py").read_text()
    listed = listed.replace("    Zero3,\n)", "    Zero3,\n    Offloaded,\n)")
    listed = listed.replace("from .replicated import", "from .offloaded import Offloaded\nfrom .replicated import")
    (storage / "kinds.py").write_text(listed)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(ROOT)]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.storage.offloaded"]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    return run.stdout + run.stderr


@pytest.mark.timeout(600)
@pytest.mark.parametrize("check", ["parity", "memory_of_its_own", "checkpoint", "files", "price"])
def test_a_kind_that_was_added(checks, check):
    assert f"{check}: passed" in checks.splitlines(), checks[-4000:]

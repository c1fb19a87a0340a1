"""A link between two nodes that is cut for good: every rank ends within its timeout, with an error that says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.namespaces import Nodes, UnavailableError, made_nodes

ROOT = Path(__file__).parents[2]
TIMEOUT = 15.0
LIMIT = 120.0  # seconds for a rank to end: the timeout, and what this machine takes for all else


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    try:
        with made_nodes(2) as pair:
            yield pair
    except UnavailableError as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_ranks_on_both_sides_of_a_cut_link_end_within_their_timeout(nodes, tmp_path, plan):
    ranks = []
    for rank in range(2):
        folder = tmp_path / str(rank)
        folder.mkdir()
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": nodes.address(0), "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0",
            "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path), "SHARDWRIGHT_SHARED_MEMORY": "0",
        }  # fmt: skip
        script = [sys.executable, "-m", "tests.runtime.cut_off", str(folder), plan, str(TIMEOUT)]
        with (folder / "out.txt").open("w") as out:
            command = [*nodes.within(rank), *script]
            ranks.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stdout=out, stderr=out))
    try:
        deadline = time.monotonic() + 240
        while not all((tmp_path / str(rank) / "training").exists() for rank in range(2)):
            texts = [(tmp_path / str(rank) / "out.txt").read_text()[-2000:] for rank in range(2)]
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks), texts
            time.sleep(0.1)
        for number in range(2):
            nodes.cut(number)
        codes = [rank.wait(LIMIT) for rank in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    for rank in range(2):
        text = (tmp_path / str(rank) / "out.txt").read_text()
        assert codes[rank] == 1, text[-3000:]
        assert "RankError: " in text, text[-3000:]
    cut_off = (tmp_path / "1" / "out.txt").read_text()
    assert "the store of the process group has not answered" in cut_off, cut_off[-3000:]

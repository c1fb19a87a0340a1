"""A link between two nodes that is cut for good: every rank ends within its timeout, with an error that says so."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TIMEOUT = 15.0
LIMIT = 120.0  # seconds for a rank to end: the timeout, and what this machine takes for all else


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """Two network namespaces and a third with the switch between them."""

    names: tuple[str, str]
    switch: str

    def cut(self) -> None:
        """Nothing arrives any more, and nobody is told: the interfaces of the nodes keep their addresses."""
        for number in range(2):
            run("ip", "netns", "exec", self.switch, "ip", "link", "set", f"port{number}", "nomaster")


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=30)


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    names = (f"sw{os.getpid()}a", f"sw{os.getpid()}b")
    switch = f"sw{os.getpid()}s"
    collected: list[str] = []
    try:
        for name in (switch, *names):
            run("ip", "netns", "add", name)
            collected.append(name)
        run("ip", "-n", switch, "link", "add", "bridge0", "type", "bridge")
        run("ip", "-n", switch, "link", "set", "bridge0", "up")
        for number, name in enumerate(names):
            port = f"port{number}"
            run("ip", "-n", name, "link", "add", "eth0", "type", "veth", "peer", "name", port, "netns", switch)
            run("ip", "-n", switch, "link", "set", port, "master", "bridge0", "up")
            run("ip", "-n", name, "addr", "add", f"10.97.0.{number + 1}/24", "dev", "eth0")
            run("ip", "-n", name, "link", "set", "eth0", "up")
            run("ip", "-n", name, "link", "set", "lo", "up")
        yield Nodes(names=names, switch=switch)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces can't be made here: {error}")
    finally:
        for name in collected:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


@pytest.mark.parametrize("plan", ["dp=2", "tp=2"])
def test_ranks_on_both_sides_of_a_cut_link_end_within_their_timeout(nodes, tmp_path, plan):
    ranks = []
    for rank, name in enumerate(nodes.names):
        folder = tmp_path / str(rank)
        folder.mkdir()
        variables = {
            "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
            "MASTER_ADDR": "10.97.0.1", "MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(sys.path), "SHARDWRIGHT_SHARED_MEMORY": "0",
        }  # fmt: skip
        script = [sys.executable, "-m", "tests.runtime.cut_off", str(folder), plan, str(TIMEOUT)]
        command = ["ip", "netns", "exec", name, *script]
        with (folder / "out.txt").open("w") as out:
            ranks.append(subprocess.Popen(command, cwd=ROOT, env={**os.environ, **variables}, stdout=out, stderr=out))
    try:
        deadline = time.monotonic() + 240
        while not all((tmp_path / str(rank) / "training").exists() for rank in range(2)):
            texts = [(tmp_path / str(rank) / "out.txt").read_text()[-2000:] for rank in range(2)]
            assert time.monotonic() < deadline and all(rank.poll() is None for rank in ranks), texts
            time.sleep(0.1)
        nodes.cut()
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

"""Runs on several nodes: two torchrun agents on this machine, each with workers of its own."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from .lives import losses_in, run_life
from .runs import by_hand, close

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


def agents(folder: Path, plan: str, victim: int, restarts: int = 1) -> list[subprocess.CompletedProcess[str]]:
    """Two agents of one rank each, until both have ended.

    Each has a host name of its own where that is allowed: then the rank that is left takes the other's machine for
    another, and waits for its heartbeat. Its agent starts it again before it has failed by itself, and so counts no
    restart, unlike the agent of the rank that was killed.
    """
    apart = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"']
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--max-restarts",
        str(restarts), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "nodes",
        "--local-addr", "127.0.0.1", "--monitor-interval", "0.2", "-m", "tests.train.lives",
        str(folder), plan, str(victim),
    ]  # fmt: skip
    variables = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    files = [folder / f"agent{number}.txt" for number in range(2)]
    running = []
    for file in files:
        start = [*apart, file.stem, *command] if os.geteuid() == 0 and shutil.which("unshare") else command
        with file.open("w") as out:
            running.append(subprocess.Popen(start, cwd=ROOT, env={**os.environ, **variables}, stdout=out, stderr=out))
    try:
        codes = [process.wait(400) for process in running]
    finally:
        for process in running:
            process.kill()
    return [
        subprocess.CompletedProcess(command, code, file.read_text()) for code, file in zip(codes, files, strict=True)
    ]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_killed_on_one_of_two_nodes_is_started_again_on_both(tmp_path, victim):
    """By the one restart that there is: the agents count each for itself, and the store has the keys of before."""
    for ended in agents(tmp_path, "dp=2", victim):
        assert ended.returncode == 0, ended.stdout[-3000:]
    assert (tmp_path / "killed").exists()

    wanted, values = by_hand(2)
    seen = losses_in(tmp_path / "losses")
    assert [step for step, _ in seen] == [1, 2, 3, 4, 5, 6]
    close(dict(seen), wanted)
    close(torch.load(tmp_path / "values.pt"), values)

    (tmp_path / "undisturbed").mkdir()
    assert run_life(2, tmp_path / "undisturbed", "dp=2", None, 6, False) == [0, 0]
    undisturbed = torch.load(tmp_path / "undisturbed" / "values.pt")
    for name, value in torch.load(tmp_path / "values.pt").items():
        assert torch.equal(value, undisturbed[name]), name

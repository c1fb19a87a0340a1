"""What the processes of the tests of failures run: a module that fails on one rank, and scripts of their own."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from tests.launched import Ended, variables

NAP = 14.0  # seconds, longer than ranks of the tests of hangs wait
ROOT = Path(__file__).parents[2]


class Flaky(torch.autograd.Function):
    """The identity, until `Flaky.plan` says what a rank should do instead, forward or backward."""

    plan: ClassVar[dict[str, Any]] = {}

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        Flaky.act("forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        Flaky.act("backward")
        return gradient

    @classmethod
    def act(cls, when: str) -> None:
        wanted = cls.plan.get(when) if dist.is_initialized() and dist.get_rank() == cls.plan.get("rank") else None
        if wanted == "raise":
            raise ValueError(f"the data went bad in {when}")
        if wanted == "sleep":
            time.sleep(NAP)
        if wanted == "kill":
            os.kill(os.getpid(), signal.SIGKILL)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(Flaky.apply(self.first(x)))
        return Flaky.apply(self.down(F.gelu(x))).square().mean()


def train(rank: int, plan: dict[str, Any], policy: str, directory: str) -> None:
    """Two good steps, one that fails on one rank, and one more: not all ranks need each other in every step."""
    torch.manual_seed(0)
    os.environ["SHARDWRIGHT_SHARED_MEMORY"] = str(plan.get("shared", 1))
    model, optimizer = _compiled(policy, directory)
    x = torch.randn(4, 4)
    for step in range(4):
        Flaky.plan = plan if step == 2 else {}
        if step == 2 and rank == plan.get("rank") and plan.get("loop") == "sleep":
            time.sleep(NAP)
        try:
            loss = model(x)
            loss.backward()
        except ValueError:
            if plan.get("stay"):
                time.sleep(plan["stay"])
            raise
        optimizer.step()
        optimizer.zero_grad()


def _compiled(policy: str, directory: str) -> Any:
    module = Net()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return parallelize(module, optimizer, plan=policy, example=(torch.randn(4, 4),), compile={"directory": directory})


def launch(size: int, plan: dict[str, Any], policy: str, directory: Path, timeout: float) -> list[Ended]:
    """How every rank ended, as scripts of their own."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    running = []
    for rank in range(size):
        environment = {**os.environ, **variables(rank, size, store.port), "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "tests.parity.failing", json.dumps(plan), policy, str(directory / "generated")]
        out = (directory / f"rank{rank}.txt").open("w")
        running.append(subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=out))
        out.close()
    ended = _wait(running, timeout)
    first = min(ended.values(), default=0.0)
    texts = [(directory / f"rank{rank}.txt").read_text() for rank in range(size)]
    return [
        Ended(code=process.returncode, text=texts[rank], seconds=ended.get(rank, float("inf")) - first)
        for rank, process in enumerate(running)
    ]


def _wait(running: list[subprocess.Popen[bytes]], timeout: float) -> dict[int, float]:
    """When each ended; those that did not in time are killed."""
    ended: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while len(ended) < len(running) and time.monotonic() < deadline:
        for rank, process in enumerate(running):
            if rank not in ended and process.poll() is not None:
                ended[rank] = time.monotonic()
        time.sleep(0.05)
    for process in running:
        if process.poll() is None:
            process.kill()
        process.wait()
    return ended


if __name__ == "__main__":
    torch.set_num_threads(1)
    train(0, json.loads(sys.argv[1]), sys.argv[2], sys.argv[3])

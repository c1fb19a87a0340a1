"""Scripts whose ranks do different things, for test_desync.py. Every one trains well for two steps first."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardwright as sw


class Net(nn.Module):
    def __init__(self, hidden: int = 8) -> None:
        super().__init__()
        self.up = nn.Linear(4, hidden)
        self.down = nn.Linear(hidden, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x))).square().mean()


def train(case: str, plan: str, shared: int, directory: str) -> None:
    """Rank 1 does something else than the others in the third step."""
    os.environ["SHARDWRIGHT_SHARED_MEMORY"] = str(shared)
    torch.manual_seed(0)
    odd = int(os.environ["RANK"]) == 1
    module = Net(16 if odd and case == "model" else 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    timeout = 8.0 if case == "save" else 60.0
    options: dict[str, Any] = {"compile": {"directory": f"{directory}/code", "timeout": timeout}}
    if case == "microbatches":
        options["pipeline"] = {"microbatches": 4 if odd else 2}
    if case == "plan":
        plan = "tp=2" if odd else "dp=2"
    model, optimizer = sw.parallelize(module, optimizer, plan=plan, example=torch.randn(4, 4), **options)
    for step in range(6):
        x = torch.full((4, 4), float(step + 1))
        now = odd and step == 2
        if now and case == "forward":
            model(x)  # an extra call
        if now and case == "evaluation":
            model.eval()
            model(x)
            model.train()
        if now and case == "state":
            model.full_state_dict()
        if now and case == "save":
            sw.save(f"{directory}/saved", model)
        loss = model(x)
        if not (now and case == "backward"):
            loss.backward()
        if now and case == "norm":
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

"""A rank that trains until its link is cut. Started by test_cut_off.py in a network namespace of its own."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

import shardwright as sw


def main(folder: Path, plan: str, timeout: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options = sw.CompileOptions(timeout=timeout, directory=folder)
    model, optimizer = sw.parallelize(model, optimizer, plan=plan, compile=options)
    for step in range(1_000_000):
        model(torch.ones(4, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            (folder / "training").touch()


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]))

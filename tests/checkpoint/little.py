"""A small run on one process, without a plan: for what has nothing to do with ranks."""

from __future__ import annotations

import torch
from torch import nn


class Net(nn.Module):
    """Parameters, tied weights, a persistent buffer and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm = nn.BatchNorm1d(6)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.up.weight
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.down(self.norm(self.up(x + self.table)).relu())).square().mean()


def little(seed: int = 0) -> tuple[Net, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    net = Net().double()
    return net, torch.optim.AdamW(net.parameters(), lr=0.05)


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    losses = []
    for _ in range(steps):
        loss = net(torch.randn(3, 4, dtype=torch.float64))  # draws from torch's generator, which is saved too
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

"""What a new user's loop does with outputs and modes of a model, in a few lines each."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .running import PLANS, check, noise, parameters, seeded

X, Y = noise(8, 6), noise(8, 3, seed=1)


class Heads(nn.Module):
    """Outputs in a dict, of which one is a pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 4)

    def forward(self, x):
        return {"first": self.first(x), "rest": (self.second(x), 2 * x)}


def train(one_line, loss_of):
    model = seeded(lambda: Heads().double())
    model, optimizer = one_line(model, torch.optim.SGD(model.parameters(), lr=0.1))
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = loss_of(model(X))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *parameters(model)]


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_may_be_written_to_in_place(plan):
    def loss_of(outputs):
        first, (second, double) = outputs["first"], outputs["rest"]
        first += 1
        first[:, 0] *= 2
        double.zero_()
        return F.mse_loss(first, Y) + F.relu_(second).mean()

    check(lambda one_line: train(one_line, loss_of), plan)

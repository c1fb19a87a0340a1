"""Models that return numbers, and compute with them: alike on all ranks, and those of one device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from tests.runtime.ranks import run_ranks
from tests.verified import referred, verified


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.first(x).relu()
        scale = y.sum().item() / (y > 0).sum().item()
        loss = (self.last(y) / (1 + scale)).square().mean()
        return {"loss": loss, "logged": loss.item(), "scale": scale, "active": (y > 0).sum().item()}


def test_numbers_are_those_of_one_device():
    torch.manual_seed(0)
    reference = referred(Scaled(), (torch.randn(4, 8),), entries=("train", "eval"))
    for plan in ("dp=2", "tp=2", "zero3=2"):
        report = verified(reference, plan)
        assert report, report
        assert {"logged", "scale", "active"} <= {row.name for row in report.rows}


class Logged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4))

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        loss = self.net(x).square().mean()
        return loss, loss.item()


@pytest.mark.parametrize("plan", ["dp=2", "pp=2"])
def test_every_rank_gets_the_number_of_the_whole_batch(plan, tmp_path):
    torch.manual_seed(0)
    x, states = torch.randn(4, 8), Logged().state_dict()

    def run(rank: int) -> Any:
        net = Logged()
        net.load_state_dict(states)
        return parallelize(net, plan=plan, example=(x,), compile={"directory": tmp_path})(x)[1]

    net = Logged()
    net.load_state_dict(states)
    results = run_ranks(2, run)
    assert [type(number) for number in results] == [float, float]
    assert results == pytest.approx([net(x)[1]] * 2, rel=1e-6)

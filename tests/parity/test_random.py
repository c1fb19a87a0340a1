"""Random ops that know no shards are drawn alike on all ranks, whole, and again from the same key."""

import torch
from torch import Tensor, nn

import shardwright as sw
from tests.runtime.ranks import run_processes


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return (y + torch.rand_like(y)).square().mean()


def losses(rank: int, directory: str) -> list[list[float]]:
    torch.manual_seed(rank)  # an unseeded script: what the global generators hold must not matter
    collected = []
    for plan in ("tp=2", "dp=2"):
        model = sw.parallelize(Noisy(), example=(torch.ones(4, 8),), plan=plan, compile={"directory": directory})
        collected.append([model(torch.ones(4, 8)).item() for _ in range(2)])
    return collected


def test_all_ranks_draw_the_same_noise_and_every_step_another(tmp_path):
    # Processes, since threads share torch's one global generator.
    first, second = run_processes(2, losses, str(tmp_path), timeout=200)
    assert first == second
    assert all(value != other for value, other in first)


def test_the_plan_says_that_noise_is_drawn_whole():
    plan = sw.plan(Noisy(), example=(torch.ones(4, 8),), plan="tp=2")
    assert any("rand_like" in note and "whole" in note for note in plan.notes)

"""A loop on a small model of the test's own, on one device and on ranks that are threads: both must see the same.

    agree(Critic, "dp=2,tp=2", loop)

calls `loop(model, optimizer)` with the original and, on every rank, with what `parallelize` returns.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .threaded import world_of

TOLERANCE = 1e-10
X, OTHER = (torch.randn(4, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(at)) for at in range(2))
LABELS = torch.tensor([0, 3, 1, 2])


class Critic(nn.Module):
    """Scores, of which the user makes a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(8, 12), nn.Linear(12, 12), nn.Linear(12, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.mid(torch.tanh(self.up(x)))))  # type: ignore[no-any-return]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(12, 12)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.inner(x))  # type: ignore[no-any-return]


class Classifier(nn.Module):
    """Computes its loss itself; the layers after the first are alike, so that they can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 4)
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        x = torch.tanh(self.up(x))
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.down(x), labels)


Loop = Callable[[Any, torch.optim.Optimizer], list[Tensor]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def on_ranks(
    make: Callable[[], nn.Module], plan: str, loop: Loop, optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    prepare: Callable[[nn.Module], None] = lambda model: None, **options: Any,
) -> tuple[list[Tensor], list[list[Tensor]]]:  # fmt: skip
    """What a loop says on one device and on every rank. `prepare` is for what copies do not have, such as hooks."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        original = make().double()
    copies = [copy.deepcopy(original) for _ in range(world_of(plan))]  # threads share torch's generator
    for model in (original, *copies):
        prepare(model)
    wanted = loop(original, optimizer([p for p in original.parameters() if p.requires_grad]))
    folder = tempfile.mkdtemp(prefix="paths-")

    def run(rank: int) -> list[Tensor]:
        instance = optimizer([p for p in copies[rank].parameters() if p.requires_grad])
        return loop(*parallelize(copies[rank], instance, plan=plan, **grouped(directory=folder, **options)))

    return wanted, run_ranks(world_of(plan), run)


def agree(
    make: Callable[[], nn.Module], plan: str, loop: Loop, optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    **options: Any,
) -> None:  # fmt: skip
    """Run a loop both ways, and compare all it says."""
    wanted, ranks = on_ranks(make, plan, loop, optimizer, **options)
    assert wanted
    scale = max(float(expected.detach().abs().max()) for expected in wanted if expected.numel())
    assert scale > 0
    for rank in ranks:
        assert len(rank) == len(wanted)
        for number, (mine, other) in enumerate(zip(rank, wanted, strict=True)):
            assert mine.shape == other.shape, number
            apart = float((mine.detach() - other.detach()).abs().max()) if other.numel() else 0.0
            assert apart <= TOLERANCE * scale, f"item {number} of {len(wanted)} is {apart:.2e} off"

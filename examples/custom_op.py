"""A model with ops of its own: one with a rule, one that is probed, one with its own algorithm.

    python examples/custom_op.py

Prints how they are split, then compares two plans with one device, with threads for ranks.
"""

import torch
from rich.console import Console
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime import SplitDim
from shardwright.runtime.collectives import comm


@sw.register_op("b (h d^) -> b (h d^)")
def rotated(x: Tensor, h: int) -> Tensor:
    """The two halves of every head turned by one radian; a rank that has half of the heads calls it with half of h."""
    first, two = x.unflatten(1, (h, 2, -1)).unbind(2)
    angle = torch.tensor(1.0)
    return torch.stack([first * angle.cos() - two * angle.sin(), first * angle.sin() + two * angle.cos()], 2).flatten(1)


@sw.register_op()
def softened(x: Tensor) -> Tensor:
    """Nobody says how this may be split: it is probed."""
    return x * x.square().sum(-1, keepdim=True).rsqrt()


def centred_over_ranks(x: Tensor, part: SplitDim) -> Tensor:
    """The mean over the rows of all ranks: a sum forward, and another one backward."""
    total = comm.all_reduce(x.sum(0), part.group, dst=comm.R)
    return x - total / part.size


@sw.register_op("n=centred d -> n d", algorithms={"n": centred_over_ranks})
def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = self.down(rotated(self.up(x), h=8))
        return nn.functional.cross_entropy(softened(centred(x)), y)


def main() -> None:
    torch.manual_seed(0)
    console = Console()
    model, example = Net(), (torch.randn(8, 16), torch.randint(8, (8,)))
    for text in ("dp=2", "dp=2,tp=2"):
        plan = sw.plan(model, example=example, plan=text)
        console.print(sw.explain(plan))
        report = sw.verify(model, text, example=example, method="threads")
        console.print(str(report))
        assert report.passed


if __name__ == "__main__":
    main()

"""Train a convolutional net with batch norm, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node=2 examples/convnet.py --plan dp=2

Batch norm takes its statistics over the global batch, whatever the plan, so that the net is the one that a
single device trains: at the end rank 0 does so, and compares losses and running means.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import shardwright as sw
from pictures import CLASSES, batches, parse, show
from shardwright.runtime.world import start


class Residual(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(y)))


class ConvNet(nn.Module):
    def __init__(self, width: int = 16, blocks: int = 3) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.head = nn.Linear(width, CLASSES)

    def forward(self, image: Tensor, label: Tensor) -> Tensor:
        x = self.blocks(F.relu(self.norm(self.stem(image))))
        return F.cross_entropy(self.head(F.adaptive_avg_pool2d(x, 1).flatten(1)), label)


def build(seed: int, device: torch.device) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = ConvNet().to(device)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[tuple[Tensor, Tensor]]) -> list[float]:
    losses = []
    model.train()
    for image, label in batches:
        loss = model(image, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main(argv: list[str] | None = None) -> tuple[list[tuple[float, float]], float]:
    """Returns on rank 0 the losses in parallel and on one device, and how far running means are apart."""
    args = parse(argv, __doc__, plan="dp=2")
    world = start()
    model, optimizer = sw.parallelize(
        *build(args.seed, world.device), plan=args.plan, compile=sw.CompileOptions(directory=args.code)
    )
    losses = train(model, optimizer, batches(args, world.device))
    means = model.full_state_dict()["norm.running_mean"]
    if world.rank != 0:
        return [], 0.0
    single, single_optimizer = build(args.seed, world.device)
    pairs = list(zip(losses, train(single, single_optimizer, batches(args, world.device)), strict=True))
    show(pairs)
    apart = float((means - single.state_dict()["norm.running_mean"]).abs().max())
    print(f"running means differ by {apart:.1e}")
    return pairs, apart


if __name__ == "__main__":
    main()

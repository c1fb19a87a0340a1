"""Small pictures that have to be told apart: bars of eight directions, with noise. The same on every rank.

Also what the examples that learn from them share: their settings, and what they print.
"""

import argparse
from collections.abc import Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

CLASSES, SIZE = 8, 16


def pictures(*, batch: int, size: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Without end: pictures [batch, 3, size, size] and the number of their direction [batch]."""
    generator = torch.Generator().manual_seed(seed)
    grid = torch.linspace(-1, 1, size)
    y, x = torch.meshgrid(grid, grid, indexing="ij")
    while True:
        kind = torch.randint(CLASSES, (batch,), generator=generator)
        angle = (kind * torch.pi / CLASSES)[:, None, None]
        shift = (torch.rand(batch, 1, 1, generator=generator) - 0.5) / 2
        bar = torch.exp(-20 * (x * angle.cos() + y * angle.sin() - shift) ** 2)
        noise = torch.randn(batch, 3, size, size, generator=generator) * 0.3
        yield (bar[:, None] + noise).to(device), kind.to(device)


def parse(argv: list[str] | None, about: str | None, plan: str) -> argparse.Namespace:
    """The settings of a run; `plan` is the usual one."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default=plan, help="for example dp=2, tp=2, zero3=2, auto")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--code", default=".shardwright", help="where generated code goes")
    return parser.parse_args(argv)


def batches(args: argparse.Namespace, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """The pictures of a run."""
    return islice(pictures(batch=args.batch, size=SIZE, seed=args.seed, device=device), args.steps)


def show(pairs: Sequence[tuple[float, float]]) -> None:
    """Losses in parallel and on one device, step by step."""
    for step, (parallel, alone) in enumerate(pairs):
        print(f"step {step + 1:3d}  loss {parallel:.5f}  on one device {alone:.5f}")

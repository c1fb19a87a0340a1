"""Small pictures that have to be told apart: bars of eight directions, with noise. The same on every rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

CLASSES = 8


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

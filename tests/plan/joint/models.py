"""Graphs for tests of pipelines, captured once; nothing is allocated."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import nn
from torch.nn import functional as F

from shardwright.capture import capture
from shardwright.planning import only_scalars
from shardwright.rules import Analysis, analyse
from tests.plan.test_auto import Language


class Chain(nn.Module):
    """Equal layers and a loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return F.mse_loss(x, torch.zeros_like(x))


@lru_cache
def chain(width: int = 1024, layers: int = 8, batch: int = 4096) -> Analysis:
    with torch.device("meta"):
        return analyse(capture(Chain(width, layers), (torch.zeros(batch, width),), {}).graph)


@lru_cache
def language(width: int = 1024, layers: int = 8, batch: int = 32, seq: int = 512, vocab: int = 4096) -> Analysis:
    with torch.device("meta"):
        model = Language(width=width, heads=width // 64, layers=layers, vocab=vocab, seq=seq)
        ids = torch.zeros(batch, seq, dtype=torch.int64)
    return analyse(only_scalars(capture(model, (ids, ids.clone()), {}).graph))

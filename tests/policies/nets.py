"""Random small models: a stack of blocks of the usual kinds, in random order and sizes, and a loss."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Feed(nn.Module):
    """A residual MLP, gated or not."""

    def __init__(self, width: int, hidden: int, gated: bool, dropout: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * hidden if gated else hidden)
        self.down = nn.Linear(hidden, width, bias=not gated)
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.up(self.norm(x))
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            hidden = F.silu(gate) * value
        else:
            hidden = F.gelu(hidden)
        return x + self.drop(self.down(hidden))


class Attend(nn.Module):
    """Self-attention with fused queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: Tensor) -> Tensor:
        batch, places, width = x.shape
        q, k, v = (
            part.view(batch, places, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(self.norm(x)).split(width, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return x + self.proj(y.transpose(1, 2).reshape(batch, places, width))


class Mix(nn.Module):
    """A linear over the places, as in an MLP-mixer."""

    def __init__(self, places: int) -> None:
        super().__init__()
        self.mix = nn.Linear(places, places)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.mix(x.transpose(1, 2))).transpose(1, 2)


class RandomNet(nn.Module):
    """Blocks of random kinds between an embedding and a loss."""

    def __init__(self, draw: random.Random) -> None:
        super().__init__()
        self.width, self.places, vocab = draw.choice((8, 12)), draw.choice((4, 6)), draw.choice((10, 16))
        self.embed = nn.Embedding(vocab, self.width)
        self.blocks = nn.ModuleList(self._block(draw) for _ in range(draw.randint(2, 4)))
        self.norm = nn.LayerNorm(self.width)
        self.head = nn.Linear(self.width, vocab, bias=False)
        if draw.random() < 0.3:
            self.head.weight = self.embed.weight
        self.vocab = vocab

    def _block(self, draw: random.Random) -> nn.Module:
        kind = draw.choice(("feed", "feed", "attend", "attend", "mix"))
        if kind == "feed":
            return Feed(self.width, draw.choice((6, 8, 16)), draw.random() < 0.4, draw.choice((0.0, 0.0, 0.2)))
        if kind == "attend":
            return Attend(self.width, draw.choice((2, 4)), draw.random() < 0.5)
        return Mix(self.places)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.view(-1, self.vocab), labels.view(-1))


def random_case(seed: int, batch: int) -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    """A model and its arguments."""
    draw = random.Random(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = RandomNet(draw)
        ids, labels = (torch.randint(net.vocab, (batch, net.places)) for _ in range(2))
    return net, (ids, labels)

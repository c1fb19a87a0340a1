"""The models that plans are checked on: a decoder, and a layer of experts for expert parallelism."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..capture import experts

VOCABULARY = 64


class DecoderBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        q, k, v = (
            part.view(samples, length, 4, width // 4).transpose(1, 2)
            for part in self.qkv(self.norm1(x)).chunk(3, dim=-1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(samples, length, width))
        hidden: Tensor = self.down(F.gelu(self.up(self.norm2(x))))
        return x + hidden


class Decoder(nn.Module):
    """Next-token loss."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.Sequential(*(DecoderBlock(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.head(self.norm(self.blocks(self.tokens(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


class ExpertWeights(nn.Module):
    """Each token through its experts."""

    def __init__(self, count: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(count, width, width) / width)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden)
        for expert in range(self.weight.shape[0]):
            token, choice = torch.where(index == expert)
            if len(token):
                result = torch.tanh(hidden[token] @ self.weight[expert])
                out = out.index_add(0, token, result * weights[token, choice, None])
        return out


class ExpertDecoder(nn.Module):
    """A router and four experts between an embedding and a head."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.router, self.head = nn.Linear(width, 4), nn.Linear(width, VOCABULARY)
        self.experts = experts(ExpertWeights(4, width))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.tokens(ids).flatten(0, 1)
        weights, index = self.router(x).softmax(-1).topk(2)
        return F.cross_entropy(self.head(x + self.experts(x, index, weights)), labels.flatten())

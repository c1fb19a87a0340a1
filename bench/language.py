"""The language models whose throughput was published, as plain modules: MPT and Megatron's GPT, and Llama 3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Scores(nn.Module):
    """Attention with all scores made, as everybody did before it was fused.

    Megatron's softmax scales and masks in one kernel; what is computed is of no matter here.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.dropout((q @ k.transpose(2, 3)).softmax(-1), 0.1) @ v


class Attention(nn.Module):
    """Causal: fused (flash attention), or with all scores made."""

    def __init__(self, d: int, heads: int, kv_heads: int, bias: bool, fused: bool) -> None:
        super().__init__()
        self.scores = None if fused else Scores()
        self.heads, self.kv_heads, self.head = heads, kv_heads, d // heads
        self.qkv = nn.Linear(d, (heads + 2 * kv_heads) * self.head, bias=bias)
        self.proj = nn.Linear(d, d, bias=bias)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        B, S, D = x.shape
        few = self.kv_heads * self.head
        q, k, v = self.qkv(x).split([D, few, few], 2)
        q = q.view(B, S, self.heads, self.head).transpose(1, 2)
        k = k.view(B, S, self.kv_heads, self.head).transpose(1, 2)
        v = v.view(B, S, self.kv_heads, self.head).transpose(1, 2)
        if turns is not None:
            q, k = rotate(q, turns), rotate(k, turns)
        if self.scores is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        else:
            y = self.scores(q, k, v)
        return self.proj(y.transpose(1, 2).reshape(B, S, D))


def rotate(x: Tensor, turns: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    cos, sin = turns.unbind(0)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class Block(nn.Module):
    def __init__(self, d: int, heads: int, kv_heads: int, ffn: int, kind: str) -> None:
        super().__init__()
        llama, bias = kind == "llama", kind == "megatron"
        norm = nn.RMSNorm if llama else nn.LayerNorm
        self.first, self.second = norm(d), norm(d)
        self.attention = Attention(d, heads, kv_heads, bias, fused=kind != "megatron")
        self.gate = nn.Linear(d, ffn, bias=False) if llama else None
        self.up = nn.Linear(d, ffn, bias=bias)
        self.down = nn.Linear(ffn, d, bias=bias)
        self.drop = nn.Dropout(0.1 if kind == "megatron" else 0.0)

    def forward(self, x: Tensor, turns: Tensor | None) -> Tensor:
        x = x + self.drop(self.attention(self.first(x), turns))
        y = self.second(x)
        y = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.drop(self.down(y))


class Language(nn.Module):
    """`kind` is mpt, megatron or llama."""

    def __init__(
        self, kind: str, d: int, layers: int, heads: int, kv_heads: int, ffn: int, vocab: int, seq: int
    ) -> None:
        super().__init__()
        self.kind, self.half = kind, d // heads // 2
        self.tokens = nn.Embedding(vocab, d)
        self.positions = None if kind == "llama" else nn.Embedding(seq, d)
        self.blocks = nn.ModuleList(Block(d, heads, kv_heads, ffn, kind) for _ in range(layers))
        self.norm = nn.RMSNorm(d) if kind == "llama" else nn.LayerNorm(d)
        self.head = nn.Linear(d, vocab, bias=False)
        if kind != "llama":
            self.head.weight = self.tokens.weight

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, seq = self.tokens(ids), ids.shape[1]
        turns = None
        if self.positions is None:
            angles = torch.ones(seq, self.half, device=ids.device)
            turns = torch.stack([angles.cos(), angles.sin()])
        else:
            x = x + self.positions(torch.arange(seq, device=ids.device))
        for block in self.blocks:
            x = block(x, turns)
        logits = self.head(self.norm(x)).flatten(0, 1)
        return F.cross_entropy(logits.float() if self.kind == "llama" else logits, labels.flatten())

"""A GPT with the variations that the tests need: grouped heads in one fused weight, rotary halves, checkpointing."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True, kw_only=True)
class TransformerConfig:
    vocab: int
    seq: int
    d: int
    n_layer: int = 2
    n_head: int = 4
    n_kv: int | None = None  # fewer heads of keys and values than of queries
    rotary: bool = False  # positions by rotating queries and keys, instead of learned
    dropout: float = 0.0
    checkpoint: bool = False  # each block is run again in backward


def rotate(x: Tensor) -> Tensor:
    """Turn each pair (first half, second half) of the last dim by its position's angle."""
    half = x.size(-1) // 2
    frequency = 100.0 ** -(torch.arange(half, device=x.device, dtype=x.dtype) / half)
    angle = torch.arange(x.size(-2), device=x.device, dtype=x.dtype)[:, None] * frequency
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], dim=-1)


class Attention(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.n_kv = config.n_kv or config.n_head
        self.head = config.d // config.n_head
        self.qkv = nn.Linear(config.d, (config.n_head + 2 * self.n_kv) * self.head)
        self.proj = nn.Linear(config.d, config.d)

    def forward(self, x: Tensor) -> Tensor:
        B, T, C = x.shape
        q, k, v = self.qkv(x).split([C, self.n_kv * self.head, self.n_kv * self.head], 2)
        q = q.view(B, T, self.config.n_head, self.head).transpose(1, 2)
        k = k.view(B, T, self.n_kv, self.head).transpose(1, 2)
        v = v.view(B, T, self.n_kv, self.head).transpose(1, 2)
        if self.config.rotary:
            q, k = rotate(q), rotate(k)
        if self.n_kv != self.config.n_head:
            k = k.repeat_interleave(self.config.n_head // self.n_kv, dim=1)
            v = v.repeat_interleave(self.config.n_head // self.n_kv, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(B, T, C))


class Block(nn.Module):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.ln1 = nn.LayerNorm(config.d)
        self.attn = Attention(config)
        self.ln2 = nn.LayerNorm(config.d)
        self.up = nn.Linear(config.d, 4 * config.d)
        self.down = nn.Linear(4 * config.d, config.d)
        self.drop = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop(self.attn(self.ln1(x)))
        return x + self.drop(self.down(F.gelu(self.up(self.ln2(x)))))


class Transformer(nn.Module):
    """The loss when a target is given, the logits otherwise. The head is tied to the embedding."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.d)
        self.wpe = None if config.rotary else nn.Embedding(config.seq, config.d)
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.n_layer))
        self.ln = nn.LayerNorm(config.d)
        self.head = nn.Linear(config.d, config.vocab, bias=False)
        self.head.weight = self.wte.weight

    def forward(self, idx: Tensor, target: Tensor | None = None) -> Tensor:
        x = self.wte(idx)
        if self.wpe is not None:
            x = x + self.wpe(torch.arange(idx.size(1), device=idx.device))
        x = self.drop(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.config.checkpoint else block(x)
        logits = self.head(self.ln(x))
        if target is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), target.flatten(), ignore_index=-100)

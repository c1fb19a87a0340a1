"""A GPT for packed documents."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 8


class PackedGPT(nn.Module):
    """A plain GPT that is given documents: learned positions, and a mask that does not cross them."""

    vocabulary, length = 23, 12

    def __init__(self, crossing: bool = False) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(self.vocabulary, WIDTH), nn.Embedding(self.length, WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.head, self.crossing = nn.Linear(WIDTH, self.vocabulary), crossing

    def forward(self, input_ids: Tensor, labels: Tensor, position_ids: Tensor, document_ids: Tensor) -> Tensor:
        x = self.tokens(input_ids) + self.positions(position_ids)
        q, k, v = (part.unflatten(-1, (2, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        causal = torch.ones(input_ids.shape[1], input_ids.shape[1], dtype=torch.bool).tril()
        mask = causal & (document_ids[:, None, :, None] == document_ids[:, None, None, :])
        if self.crossing:
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            attended = F.scaled_dot_product_attention(q, k, v, mask)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        x = x + self.down(F.gelu(self.up(x)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())

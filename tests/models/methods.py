"""Models with methods besides `forward`."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Coder(nn.Module):
    """An autoencoder as many are written: forward is made of methods, and training calls `loss`."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))
        self.decoder = nn.Sequential(nn.Linear(width, 16), nn.Tanh(), nn.Linear(16, width))
        self.scale = nn.Parameter(torch.ones(width))
        self.register_buffer("noise", torch.linspace(0.0, 1.0, width))
        self.temperature = 1.0

    def encode(self, x: Tensor) -> Tensor:
        return self.encoder(x) * self.scale / self.temperature

    def decode(self, z: Tensor) -> Tensor:
        return self.decoder(z)

    def forward(self, x: Tensor) -> Tensor:
        return self.decode(self.encode(x))

    def loss(self, x: Tensor) -> Tensor:
        z = self.encode(x)
        return F.mse_loss(self.decode(z), x) + 0.1 * z.square().mean()

    def loss_of_call(self, x: Tensor) -> Tensor:
        return F.mse_loss(self(x), x)

    def noisy(self, x: Tensor) -> Tensor:
        return x + self.noise

    def count(self) -> int:
        return sum(p.numel() for p in self.parameters()) + len(self.encoder[0].weight) + self.encoder[0].weight.shape[1]

    def set_temperature(self, value: float) -> None:
        self.temperature = value

    def init_hidden(self, rows: int) -> Tensor:
        return next(self.parameters()).new_zeros(rows, 8)

    def optimizer(self) -> torch.optim.Optimizer:
        decay = [p for p in self.parameters() if p.dim() >= 2]
        rest = [p for p in self.parameters() if p.dim() < 2]
        return torch.optim.SGD([{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=0.1)

    def crop(self, width: int) -> None:
        self.scale = nn.Parameter(self.scale[:width])

    def reset(self) -> None:
        nn.init.zeros_(self.scale)

    def remember(self, x: Tensor) -> Tensor:
        self.seen = self.encoder(x)
        return self.seen

    def mixed(self, x: Tensor) -> Tensor:
        return self(x) + self.encoder(x)

    def biggest(self, x: Tensor) -> float:
        return float(self.encoder(x).max())


class Talker(nn.Module):
    """A language model with the loop that small GPTs have."""

    def __init__(self, words: int = 16, length: int = 8, width: int = 8) -> None:
        super().__init__()
        self.length = length
        self.embed, self.place = nn.Embedding(words, width), nn.Embedding(length, width)
        self.mix, self.head = nn.Linear(width, width), nn.Linear(width, words)

    def forward(self, idx: Tensor, targets: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        x = self.embed(idx) + self.place(torch.arange(idx.shape[1]))
        x = torch.cumsum(torch.tanh(self.mix(x)), dim=1)
        if targets is None:
            return self.head(x[:, [-1]]), None
        logits = self.head(x)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def generate(self, idx: Tensor, tokens: int) -> Tensor:
        for _ in range(tokens):
            logits, _ = self(idx[:, -self.length :])
            idx = torch.cat([idx, logits[:, -1].argmax(-1, keepdim=True)], dim=1)
        return idx

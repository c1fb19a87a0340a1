"""What every contender of a race trains: the same GPT from the same seed, on the same global batches."""

from dataclasses import dataclass

import torch
from examples.gpt import GPT, GPTConfig
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Workload:
    name: str
    d: int
    n_layer: int = 4
    n_head: int = 8
    seq: int = 128
    batch: int = 8
    vocab: int = 512

    def config(self) -> GPTConfig:
        return GPTConfig(vocab=self.vocab, seq=self.seq, n_layer=self.n_layer, n_head=self.n_head, d=self.d)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.config())

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Global batches, equal on every rank."""
        generator = torch.Generator().manual_seed(1)
        windows = torch.randint(self.vocab, (count, self.batch, self.seq + 1), generator=generator)
        return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


NARROW = Workload(name="GPT 4 layers, d=256", d=256)
WIDE = Workload(name="GPT 4 layers, d=384", d=384)
WIDEST = Workload(name="GPT 4 layers, d=512", d=512)  # where products are nearly all of a step, and alike for everybody


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)

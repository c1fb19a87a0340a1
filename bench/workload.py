"""What every contender of a race trains: the same model from the same seed, on the same global batches."""

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from examples.gpt import GPT, GPTConfig
from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Workload(ABC):
    name: str
    kind: str = "gpt"  # of architecture
    seq: int = 128
    batch: int = 8
    vocab: int = 512

    @abstractmethod
    def model(self) -> nn.Module:
        """The model, as it is on every rank: forward(inputs, targets) is the loss."""

    @abstractmethod
    def layers(self, model: nn.Module) -> list[nn.Module]:
        """The modules of it that are layers."""

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        """Global batches, equal on every rank."""
        generator = torch.Generator().manual_seed(1)
        windows = torch.randint(self.vocab, (count, self.batch, self.seq + 1), generator=generator)
        return [(w[:, :-1].contiguous(), w[:, 1:].contiguous()) for w in windows]


@dataclass(frozen=True, kw_only=True)
class GPTWorkload(Workload):
    d: int
    n_layer: int = 4
    n_head: int = 8

    def config(self) -> GPTConfig:
        return GPTConfig(vocab=self.vocab, seq=self.seq, n_layer=self.n_layer, n_head=self.n_head, d=self.d)

    def model(self) -> GPT:
        torch.manual_seed(0)
        return GPT(self.config())

    def layers(self, model: nn.Module) -> list[nn.Module]:
        return list(model.get_submodule("blocks").children())


NARROW = GPTWorkload(name="GPT 4 layers, d=256", d=256)
WIDE = GPTWorkload(name="GPT 4 layers, d=384", d=384)
WIDEST = GPTWorkload(name="GPT 4 layers, d=512", d=512)  # matmuls are nearly all of a step, and alike for everybody


def optimizer_of(model: torch.nn.Module, *, fused: bool | None = None) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=fused or None)

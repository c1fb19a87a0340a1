"""What every contender of a race trains: the same GPT from the same seed, on the same global batches."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from examples.gpt import GPT, GPTConfig
from torch import Tensor, nn


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


class LlamaLoss(nn.Module):
    """Llama of transformers, with grouped heads, and its loss."""

    def __init__(self, work: Workload) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        super().__init__()
        config = LlamaConfig(
            vocab_size=work.vocab, hidden_size=work.d, intermediate_size=3 * work.d, num_hidden_layers=work.n_layer,
            num_attention_heads=work.n_head, num_key_value_heads=work.n_head // 4, max_position_embeddings=work.seq,
        )  # fmt: skip
        self.llama = LlamaForCausalLM(config)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = self.llama(ids, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@dataclass(frozen=True, kw_only=True)
class LlamaWorkload(Workload):
    def model(self) -> Any:
        torch.manual_seed(0)
        return LlamaLoss(self)


LLAMAS = tuple(
    LlamaWorkload(name=f"HF Llama 4 layers, d=256, {seq} tokens", d=256, seq=seq, batch=batch)
    for seq, batch in ((256, 8), (1024, 4), (2048, 2))
)


def optimizer_of(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-4)

"""A text file as characters: random batches of it that are the same on every rank, and its passages as documents."""

import re
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

DATA = Path(__file__).parent / "data" / "paradise_lost.txt"


class Characters:
    def __init__(self, path: Path) -> None:
        self.text = path.read_text(encoding="ascii")
        self.alphabet = "".join(sorted(set(self.text)))
        self.tokens = self.encode(self.text)

    def encode(self, text: str) -> Tensor:
        return torch.tensor([self.alphabet.index(c) for c in text])

    def passages(self) -> list[str]:
        """The text as documents of unequal lengths: each ends where a sentence ends with its line."""
        return [passage for passage in re.split(r"(?<=[.?!;])\n", self.text) if len(passage) > 1]

    def batches(self, *, batch: int, seq: int, seed: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
        """Without end: inputs and targets, both [batch, seq], the targets one character ahead."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            starts = torch.randint(len(self.tokens) - seq, (batch, 1), generator=generator)
            window = self.tokens[starts + torch.arange(seq + 1)].to(device)
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()

    def decode(self, tokens: Tensor) -> str:
        return "".join(self.alphabet[i] for i in tokens.tolist())

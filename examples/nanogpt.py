"""What `train_gpt.yaml` names: a GPT whose sizes are settings of their own, and a text as rows of a dataset."""

from pathlib import Path

import torch
from torch import Tensor
from torch.utils.data import Dataset

from gpt import GPT, GPTConfig

HERE = Path(__file__).parent


class NanoGPT(GPT):
    """A small GPT over ASCII characters."""

    def __init__(
        self, n_layer: int = 4, n_head: int = 4, n_embd: int = 128, block_size: int = 128, dropout: float = 0.0,
        vocab_size: int = 128,
    ) -> None:  # fmt: skip
        super().__init__(
            GPTConfig(vocab=vocab_size, seq=block_size, n_layer=n_layer, n_head=n_head, d=n_embd, dropout=dropout)
        )


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """Windows of a text: the characters, and the same one further. The last tenth is for validation."""

    def __init__(
        self, file: str = "data/paradise_lost.txt", block_size: int = 128, stride: int = 64, part: str = "train"
    ) -> None:
        tokens = torch.tensor(list((HERE / file).read_bytes()))
        cut = len(tokens) * 9 // 10
        self.tokens = tokens[:cut] if part == "train" else tokens[cut:]
        self.block_size, self.stride = block_size, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        window = self.tokens[row * self.stride : row * self.stride + self.block_size + 1]
        return window[:-1], window[1:]

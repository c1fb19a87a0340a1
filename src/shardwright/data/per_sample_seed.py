"""A dataset that draws by the row: what it draws depends on the seed, the epoch and the row alone.

Augmentation draws from the generators of whatever process fetches a row, which start anew when a run goes on, and
differ with the number of workers. Here all three (torch, Python, numpy) are set before each row, and put back after it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch
from torch.utils.data import Dataset

from .samples import combine_seeds


class SeededPerSample(Dataset[Any]):
    """A map-style dataset, drawing by the row. `epoch` is set by the loader."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, row: int) -> Any:
        with drawing(combine_seeds(self.seed, self.epoch, row)):
            return self.dataset[row]


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Draw from a seed, in torch (on the CPU), Python and numpy; then as before."""
    held = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(held[0])
        random.setstate(held[1])
        numpy.random.set_state(held[2])

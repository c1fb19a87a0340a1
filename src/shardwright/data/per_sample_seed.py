"""A dataset with a seed per sample: its randomness depends on the seed, the epoch and the sample's index alone.

Augmentation draws from the generators of the process that fetches a sample. They restart when a run resumes, and differ
with the number of workers. Here torch, Python and numpy are seeded for each sample, and restored after it.
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
    """A map-style dataset with a seed per sample. `epoch` is set by the loader."""

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset, self.seed, self.epoch = dataset, seed, 0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        with drawing(combine_seeds(self.seed, self.epoch, index)):
            return self.dataset[index]


@contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Seed torch (on the CPU), Python and numpy within this context; then restore them."""
    before = torch.get_rng_state(), random.getstate(), numpy.random.get_state()
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        numpy.random.set_state(before[2])

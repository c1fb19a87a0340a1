"""The least that parameters cost on a pipeline rank, whatever the ops do: the part of bounds that needs no tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import numpy as np

from ...cost.resources import COUNT, phases, row
from ..problem_structure import ProblemStructure
from ..storage_options import StorageOptions

SECONDS = row(compute_backward=1.0, beside_forward=1.0, beside_backward=1.0, update=1.0)
"""The resources that make up the time of parameters."""


class ParameterBounds:
    """The least that all parameters of a graph cost on a pipeline rank, each in its own best storage."""

    def __init__(self, skeleton: ProblemStructure, storage_options: Sequence[StorageOptions], overlap: float) -> None:
        many = Counter(skeleton.variables[at].kind for at in skeleton.storage_options.values())
        priced = [(options.used, many[kind]) for kind, options in enumerate(storage_options) if len(options.used)]
        self.overlap, self.counts = overlap, np.array([count for _, count in priced], dtype=float)
        self.used = np.concatenate([np.zeros((0, COUNT)), *(used for used, _ in priced)])
        self._fast: dict[int, float] = {}
        self.starts = np.cumsum([0, *(len(used) for used, _ in priced)])[:-1]

    def least_at(self, prices: np.ndarray, microbatches: int) -> np.ndarray:
        """At each price of memory the least of seconds of a step + price * bytes stored.

        Seconds are those of accumulating gradients, of overlapped communication as far as it is always exposed, and of
        the update.
        """
        time = np.sum([forms[0] for forms in phases(self.overlap, microbatches)], axis=0) * SECONDS
        return self._least(time[:, None] + prices * row(stored=1.0)[:, None])

    def _least(self, weights: np.ndarray) -> np.ndarray:
        if not len(self.used):
            return np.zeros(weights.shape[1])
        least: np.ndarray = self.counts @ np.minimum.reduceat(self.used @ weights, self.starts)
        return least

    def most(self, weights: np.ndarray) -> float:
        """What all of them cost, each in its most expensive storage."""
        if not len(self.used):
            return 0.0
        return float(self.counts @ np.maximum.reduceat(self.used @ weights, self.starts))

    def fast_stored(self, microbatches: int) -> float:
        """Bytes per device if every parameter is in its fastest storage."""
        if microbatches not in self._fast:
            cheap = 1e-9 / max(self.stored, 1.0)  # seconds for all bytes: breaks ties in favour of the leaner storage
            both = self.least_at(np.array([0.0, cheap]), microbatches)
            self._fast[microbatches] = float(both[1] - both[0]) / cheap
        return self._fast[microbatches]

    @cached_property
    def stored(self) -> float:
        """The least bytes per device."""
        return float(self._least(row(stored=1.0)[:, None])[0])

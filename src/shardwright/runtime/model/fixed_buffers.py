"""Buffers whose values are constants of a program, such as one that holds a causal mask: guarded like attributes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from .guards import Hop


class FixedBuffer:
    """A buffer by what it holds: writing other values to it is noticed, and loading the same ones is no change."""

    def __init__(self, name: str, read: Callable[[str], Tensor | None]) -> None:
        self.name, self._read = name, read
        self._contents: list[Tensor] = []
        self._labels: list[str] = []
        self._last: tuple[int, int] | None = None
        self._label = "absent"  # on a rank of a pipeline that does not hold it

    @property
    def key(self) -> Hashable:
        return ("buffer", self.name)

    def look(self) -> tuple[Any, list[Hop]]:
        return self._now(self.name), [(self._now, self.name)]

    def _now(self, name: str, default: Any = None) -> str:
        """A label for what the buffer holds now; the same object for the same values."""
        tensor = self._read(name)
        if tensor is None or (id(tensor), tensor._version) == self._last:
            return self._label
        self._last = (id(tensor), tensor._version)
        for contents, label in zip(self._contents, self._labels, strict=True):
            if torch.equal(contents, tensor):
                self._label = label
                return label
        self._contents.append(tensor.detach().clone())
        self._labels.append(f"values {len(self._labels)}")
        self._label = self._labels[-1]
        return self._label

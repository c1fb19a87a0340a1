"""From samples to a batch, also where a replica has no samples, or some that are only padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError
from .stream import StreamShare

Collate = Callable[[list[Any]], Any]
Ignore = Mapping[str | int, float]
"""What to write for samples that only pad a batch: by key of a dict, or position in a tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCollate:
    """Collate for map-style datasets. A replica without samples takes shapes from the first sample."""

    collate: Collate
    dataset: Any

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else emptied(self.collate([self.dataset[0]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCollate:
    """For a share of a stream: the batch and its metadata."""

    collate: Collate

    def __call__(self, share: StreamShare) -> tuple[Any, StreamShare]:
        batch = self.collate(share.rows) if share.rows else emptied(self.collate([share.like]))
        return batch, replace(share, rows=[], like=None)


def emptied(batch: Any) -> Any:
    """An empty batch with the shapes and dtypes of another."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: emptied(value) for key, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(emptied(value) for value in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(emptied(value) for value in batch if not isinstance(value, str | bytes))
    return batch


def fill(batch: Any, ignore: Ignore, padding: int) -> Any:
    """A batch whose padding samples at its end are marked to be ignored."""
    if not padding:
        return batch
    for key, value in ignore.items():
        try:
            tensor = batch[key]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"ignore={dict(ignore)}: a batch of type {type(batch).__name__} has no {key!r}") from None
        if not isinstance(tensor, Tensor) or tensor.dim() == 0:
            raise InputError(f"ignore={dict(ignore)}: {key!r} of the batch is not a tensor with a batch dim")
        tensor[tensor.shape[0] - padding :] = value
    return batch

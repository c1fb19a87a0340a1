"""From rows to a batch, also where a group has no rows, or some that only fill it up."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import InputError
from .stream import StreamShare

Collate = Callable[[list[Any]], Any]
Ignore = Mapping[str | int, float]
"""What to write in the places of rows that only fill a batch up: by key of a dict, or place in a tuple."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleCollate:
    """For rows of a map-style dataset. A group without rows takes a look at the first of the dataset."""

    collate: Collate
    dataset: Any

    def __call__(self, rows: list[Any]) -> Any:
        return self.collate(rows) if rows else emptied(self.collate([self.dataset[0]]))


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareCollate:
    """For a share of a stream: the batch, and what is to be known about it."""

    collate: Collate

    def __call__(self, share: StreamShare) -> tuple[Any, StreamShare]:
        batch = self.collate(share.rows) if share.rows else emptied(self.collate([share.like]))
        return batch, replace(share, rows=[], like=None)


def emptied(batch: Any) -> Any:
    """A batch like another one, of no rows."""
    if isinstance(batch, Tensor):
        return batch[:0] if batch.dim() else batch
    if isinstance(batch, Mapping):
        return {key: emptied(held) for key, held in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(emptied(held) for held in batch))
    if isinstance(batch, tuple | list):
        return type(batch)(emptied(held) for held in batch if not isinstance(held, str | bytes))
    return batch


def fill(batch: Any, ignore: Ignore, padding: int) -> Any:
    """A batch whose last rows are marked as such that don't count."""
    if not padding:
        return batch
    for key, value in ignore.items():
        try:
            held = batch[key]
        except (KeyError, IndexError, TypeError):
            raise InputError(f"ignore={dict(ignore)}: a batch of type {type(batch).__name__} has no {key!r}") from None
        if not isinstance(held, Tensor) or held.dim() == 0:
            raise InputError(f"ignore={dict(ignore)}: {key!r} of the batch is no tensor with rows")
        held[held.shape[0] - padding :] = value
    return batch

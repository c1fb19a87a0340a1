"""From data to batches for this rank, and from batches to updates.

A dataset (map-style, iterable, or a list of rows) becomes batches of `rows` rows over all ranks. A `DataLoader` or
`shardwright.data.Loader` gives batches already, and is taken as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate

from ..data import Loader, loader, share
from ..data.collate import RowsCollate
from ..errors import InputError
from .batches import rows_in
from .options import LoaderOptions

MakeSampler = Callable[[Any], Iterable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One batch of an update."""

    batch: Any
    rows: int  # of all ranks together


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Data, and how batches are made of it; for which rank is not known before there is a plan."""

    data: Any
    rows: int | None  # of a batch, over all ranks; None if the data gives batches
    options: LoaderOptions
    seed: int
    shuffle: bool | None
    sampler: MakeSampler | None = None

    @property
    def is_ready(self) -> bool:
        """Whether the data gives batches already."""
        return isinstance(self.data, DataLoader | Loader)

    def batches(self, rank: int, ranks: int) -> Loader:
        """Batches for one of `ranks` groups that share them."""
        if isinstance(self.data, Loader):
            return self.data
        if isinstance(self.data, DataLoader):
            return Loader(self.data, seed=self.seed)
        assert self.rows is not None
        held = self.options
        collate = held.collate or default_collate
        if self.sampler is not None:
            order = Sampled(self.sampler(self.data), self.rows, rank, ranks, held.last == "drop")
            bound = RowsCollate(collate=collate, dataset=self.data)
            made = DataLoader(
                self.data, batch_sampler=order, num_workers=held.workers, collate_fn=bound, **self._more()
            )
            return Loader(made, seed=self.seed)
        streams = isinstance(self.data, IterableDataset) or not hasattr(self.data, "__getitem__")
        return loader(
            self.data, self.rows, rank=rank, ranks=ranks, seed=self.seed,
            shuffle=not streams if self.shuffle is None else self.shuffle,
            last=held.last, ignore=held.ignore, workers=held.workers, collate=collate, **self._more(),
        )  # fmt: skip

    def _more(self) -> dict[str, Any]:
        pinned = torch.cuda.is_available() if self.options.pin_memory is None else self.options.pin_memory
        more: dict[str, Any] = {"pin_memory": pinned}
        return more if self.options.prefetch is None else {**more, "prefetch_factor": self.options.prefetch}

    def example(self, ranks: int) -> Any:
        """The first batch that a group of `ranks` would get, without a worker. Nothing is moved by it."""
        if isinstance(self.data, Loader):
            place = self.data.state_dict()
            found = next(iter(self.data), None)
            self.data.load_state_dict(place)
        elif isinstance(self.data, DataLoader):
            found = next(iter(self.data), None)
        else:
            alone = replace(self.options, workers=0, prefetch=None, pin_memory=False)
            plain = replace(self, options=alone, shuffle=False, sampler=None)
            found = next(iter(plain.batches(0, ranks)), None)
        if found is None:
            raise InputError("the training data is empty: it gives no batch")
        return found


class Sampled(Sampler[list[int]]):
    """Batches of the rows that a sampler names, of which a group takes its share. The sampler is alike on all ranks."""

    def __init__(self, rows: Iterable[int], batch: int, rank: int, ranks: int, drop: bool) -> None:
        self.rows, self.batch, self.rank, self.ranks, self.drop = rows, batch, rank, ranks, drop

    def __iter__(self) -> Iterator[list[int]]:
        left = iter(self.rows)
        while taken := list(islice(left, self.batch)):
            if len(taken) == self.batch or not self.drop:
                yield [taken[at] for at in share(len(taken), self.rank, self.ranks)]

    def __len__(self) -> int:
        total = len(self.rows)  # type: ignore[arg-type]
        return total // self.batch if self.drop else -(-total // self.batch)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.rows, "set_epoch"):
            self.rows.set_epoch(epoch)


def parts_of(batches: Loader, ranks: int) -> Iterator[Part]:
    """The batches that are left of this epoch, with the rows that they have over all ranks."""
    for batch in batches:
        yield Part(batch=batch, rows=batches.total or rows_in(batch) * ranks)


def updates(parts: Iterator[Part], count: int) -> Iterator[list[Part]]:
    """As many batches as an update takes; the last of an epoch may have fewer."""
    while taken := list(islice(parts, count)):
        yield taken

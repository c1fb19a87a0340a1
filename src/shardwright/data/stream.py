"""Samples of a stream: an iterable dataset that all ranks and all workers read alike.

A stream has no indices to divide, so every rank reads all of it and takes its share. Samples form
global batches in the order of the stream; worker w of W takes the batches w, w + W, ..., which is
the order in which a DataLoader reads from its workers; of each batch a replica takes its share.

    stream      a b c d | e f g h | i j
    worker 0    a b c d           | i j          of which replica 0 takes  a b,  i
    worker 1              e f g h                                        e f

Since all copies of the dataset read the same samples, the `state_dict` of one is the position of
all, with any number of replicas and workers. Without a state a run resumes by reading again from
the start.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info

from .samples import BatchShare, Last


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamShare:
    """A replica's share of one global batch."""

    rows: list[Any]
    like: Any  # a sample of the batch, for a replica that has none
    total: int  # samples of the global batch
    padding: int  # how many of `rows` are padding
    state: dict[str, Any] | None  # of the dataset after this batch, if it has one, and whether it has ended


class Stream(IterableDataset[StreamShare]):
    """A replica's share of every global batch of a stream. The dataset must yield the same samples on all ranks.

    Skips `skip` samples, or restores the dataset from the `state` of a `StreamShare`, if not None.
    """

    def __init__(
        self, dataset: Iterable[Any], batch: int, *, rank: int = 0, ranks: int = 1, last: Last = "keep"
    ) -> None:
        self.sharing = BatchShare(batch=batch, rank=rank, ranks=ranks, last=last)
        self.dataset = dataset
        self.epoch = self.skip = 0
        self.state: dict[str, Any] | None = None
        self._first = copy.deepcopy(dataset.state_dict()) if self.has_state else None  # type: ignore[attr-defined]

    @property
    def has_state(self) -> bool:
        """Whether the dataset can save its position."""
        return has_state(self.dataset)

    def __iter__(self) -> Iterator[StreamShare]:
        worker = get_worker_info()
        mine, every = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        if self.state is not None and self.state["ended"]:  # its own state may already be its beginning
            return
        if self.has_state:
            state = copy.deepcopy(self._first if self.state is None else self.state["dataset"])
            self.dataset.load_state_dict(state)  # type: ignore[attr-defined]
        samples = iter(self.dataset)
        for _ in range(0 if self.state is not None else self.skip):
            next(samples, None)
        number = 0
        while self.sharing.count(len(batch := _take(samples, self.sharing.batch))):
            if number % every == mine:
                yield self._share(batch)
            number += 1

    def _share(self, batch: list[Any]) -> StreamShare:
        total = len(batch)
        samples = [batch[index] for index in self.sharing.mine(total)]
        padding = self.sharing.padding(total)
        samples += [batch[at % total] for at in range(padding)]
        state = None
        if self.has_state:
            dataset_state = self.dataset.state_dict()  # type: ignore[attr-defined]
            state = {"ended": total < self.sharing.batch, "dataset": copy.deepcopy(dataset_state)}
        return StreamShare(rows=samples, like=batch[0], total=total, padding=padding, state=state)


def has_state(dataset: Any) -> bool:
    """Whether a stream can save its position."""
    return hasattr(dataset, "state_dict") and hasattr(dataset, "load_state_dict")


def is_stream(dataset: Any) -> bool:
    """Whether a dataset is iterable, not map-style."""
    return isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__")


def _take(samples: Iterator[Any], count: int) -> list[Any]:
    batch = []
    for sample in samples:
        batch.append(sample)
        if len(batch) == count:
            break
    return batch

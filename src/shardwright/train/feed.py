"""From data to batches for this rank, and from batches to updates.

A dataset (map-style, iterable, or a list of samples) becomes global batches. A `DataLoader` or
`shardwright.data.Loader` yields batches already and is used as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, default_collate

from ..data import Loader, PackedDocuments, loader
from ..data.loader import place_of
from ..data.stream import is_stream
from ..errors import InputError
from ..runtime import accelerator
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.model.reduction import LossReduction
from .batches import samples_in
from .options import LoaderOptions

MakeSampler = Callable[[Any], Iterable[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateBatch:
    """One batch of an update."""

    batch: Any
    rows: int  # of all ranks together
    shares: int  # how many replicas share it
    whole: bool  # whether every replica has all of it instead of a share


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchSource:
    """Data and how to batch it; the plan decides later which rank gets what."""

    data: Any
    rows: int | None  # of a batch, over all ranks; None if the data yields batches
    options: LoaderOptions
    seed: int
    shuffle: bool | None
    sampler: MakeSampler | None = None

    def batches(self, model: ParallelModel) -> Loader:
        """Batches for this rank of a compiled model."""
        return self._batches(*place_of(model), model)

    def _batches(self, rank: int, ranks: int, model: ParallelModel | None) -> Loader:
        if isinstance(self.data, Loader):
            return self.data
        if isinstance(self.data, DataLoader):
            return Loader(self.data, seed=self.seed, model=model)
        assert self.rows is not None
        options = self.options
        whose: dict[str, Any] = {} if model is not None else {"rank": rank, "ranks": ranks}
        shuffle = self.sampler is None and not is_stream(self.data) if self.shuffle is None else self.shuffle
        data = self.data
        if options.packing is not None:
            data, shuffle = PackedDocuments(data, options.packing, shuffle=shuffle, seed=self.seed), False
        return loader(
            data, self.rows, model=model, seed=self.seed, last=options.last, ignore=options.ignore,
            shuffle=shuffle,
            workers=options.workers, collate=options.collate or default_collate, draw_by_row=options.draw_by_row,
            sampler=None if self.sampler is None else self.sampler(self.data), **whose, **self._more(),
        )  # fmt: skip

    def _more(self) -> dict[str, Any]:
        pinned = accelerator.is_available() if self.options.pin_memory is None else self.options.pin_memory
        more: dict[str, Any] = {"pin_memory": pinned, **self.options.options}
        return more if self.options.prefetch is None else {**more, "prefetch_factor": self.options.prefetch}

    def example(self, ranks: int) -> Any:
        """The first batch of one of `ranks` replicas, loaded without workers and without advancing the data."""
        if isinstance(self.data, Loader):
            place = self.data.state_dict()
            batch = next(iter(self.data), None)
            self.data.load_state_dict(place)
        elif isinstance(self.data, DataLoader):
            batch = next(iter(self.data), None)
        else:
            alone = replace(self.options, workers=0, prefetch=None, pin_memory=False, options={})
            plain = replace(self, options=alone, shuffle=False, sampler=None)
            batch = next(iter(plain._batches(0, ranks, None)), None)
        if batch is None:
            raise InputError("the training data is empty: it yields no batch")
        return batch


def update_batches(batches: Loader, model: ParallelModel) -> Iterator[UpdateBatch]:
    """The remaining batches of this epoch, each with what must be recorded when it is loaded."""
    for batch in batches:
        shares = 1 if batches.whole or model.input_mode == "global" else model.data_size
        rows = batches.total or samples_in(batch, model) * shares
        yield UpdateBatch(batch=batch, rows=rows, shares=shares, whole=batches.whole)


def updates(parts: Iterator[UpdateBatch], count: int) -> Iterator[list[UpdateBatch]]:
    """Batches grouped by update; the last group of an epoch may be smaller."""
    while taken := list(islice(parts, count)):
        yield taken


def check_packing(options: LoaderOptions, reduction: LossReduction, data: Any) -> None:
    """Refuse settings under which the loss of packed documents would not be the mean over their tokens."""
    if options.packing is None:
        return
    if isinstance(data, DataLoader | Loader):
        raise InputError("loader.packing packs documents, but the data yields batches already: pass the documents")
    if reduction == "mean":
        raise InputError(
            "loader.packing: sequences have unequally many labels, so a mean by samples is not that over all tokens; "
            'set optimization.reduction="token"'
        )


def sizes_of(batch: int | None, micro: int | None, accumulate: int | None, data: Any) -> tuple[int | None, int]:
    """Samples per call of the model, over all ranks, and calls per update."""
    if batch is not None and batch < 1:
        raise InputError(f"batch_size={batch} must be at least 1")
    if isinstance(data, DataLoader | Loader):
        if batch is not None or micro is not None:
            raise InputError("the data yields batches already; leave out batch_size and optimization.micro_batch_size")
        return None, accumulate or 1
    if batch is None and micro is None:
        raise InputError("set the global batch size: batch_size=64")
    if batch is None:
        return micro, accumulate or 1
    calls = accumulate or (batch // micro if micro is not None else 1)
    rows = micro if micro is not None else batch // calls
    if rows * calls != batch:
        setting = f"optimization.micro_batch_size={micro}" if micro is not None else ""
        if accumulate is not None:
            setting += f"{' and ' if setting else ''}optimization.accumulate={accumulate}"
        raise InputError(f"batch_size={batch} is not a multiple of the call size with {setting}")
    return rows, calls

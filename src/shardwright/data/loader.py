"""A loader whose position can be saved: what the loop has seen, not what workers have prefetched.

    for epoch in range(batches.epoch, epochs):
        for batch in batches:
            ...
            sw.save(path, model, optimizer, data=batches)

    batches.load_state_dict(sw.load(path, model, optimizer).data)

`iter` resumes from the position of the loop, and a loop at the end of an epoch is at the beginning
of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, default_collate

from ..errors import InputError
from ..runtime.model.parallel_model import ParallelModel
from ..runtime.world import here
from .collate import Collate, Ignore, SampleCollate, ShareCollate, fill
from .per_sample_seed import SeededPerSample
from .samples import Last, ReplicaBatchSampler, SampledBatches, combine_seeds
from .stream import Stream, StreamShare, is_stream


class Loader:
    """Batches of a `DataLoader` or any iterable, with a position that can be saved.

    A DataLoader with `batch_sampler=ReplicaBatchSampler(...)` resumes at once, and so does a `Stream` whose dataset has
    a state (`loader` builds both). Anything else is iterated again from the start of the epoch, skipping what was seen;
    it must have the same order again: random samplers of torch draw from `seed` and the epoch here.
    """

    def __init__(
        self, data: Iterable[Any], *, seed: int = 0, ignore: Ignore | None = None, model: nn.Module | None = None
    ) -> None:
        self.data, self.seed, self.ignore = data, seed, dict(ignore or {})
        self._model = model if isinstance(model, ParallelModel) else None
        self.epoch = 0
        self.row = 0  # global samples of this epoch that the loop has seen; batches if samples can't be counted
        self.total = 0  # samples of the current global batch
        self.whole = False  # whether every replica has all of them
        sampler, dataset = getattr(data, "batch_sampler", None), getattr(data, "dataset", None)
        self._sampler = sampler if isinstance(sampler, ReplicaBatchSampler) else None
        self._stream = dataset if isinstance(dataset, Stream) else None
        self._state: Any = None  # of a stream, if it has one
        if self._sampler is not None:
            self.seed = self._sampler.seed
        source = self._sampler or self._stream
        self._sharing = source.sharing if source is not None else None
        if self._sharing is not None and self._sharing.last == "pad" and not self.ignore:
            raise InputError(
                'last="pad" fills a batch up with padding samples: say how to ignore them, ignore={"labels": -100} '
                '(of a dict) or ignore={1: -100} (of a tuple), or use last="keep" or "drop"'
            )
        if self._stream is not None and getattr(data, "persistent_workers", False):
            raise InputError("persistent_workers=True: persistent workers don't learn of a new position in a stream")
        self._drawn_by_row = dataset if isinstance(dataset, SeededPerSample) else None
        if self._drawn_by_row is not None and getattr(data, "persistent_workers", False):
            raise InputError("persistent_workers=True: persistent workers don't learn of a new epoch to seed by")
        self._draw_apart()

    def __repr__(self) -> str:
        return f"Loader({type(self.data).__name__}, epoch {self.epoch}, after {self.row} samples)"

    def _draw_apart(self) -> None:
        """Use a separate generator: resuming must not advance torch's a second time."""
        self._drawn = torch.Generator()
        if isinstance(self.data, DataLoader) and self.data.generator is None:
            self.data.generator = self._drawn
            for sampler in (self.data.sampler, getattr(self.data.batch_sampler, "sampler", None)):
                if isinstance(sampler, RandomSampler) and sampler.generator is None:
                    sampler.generator = self._drawn

    def __iter__(self) -> Iterator[Any]:
        self._drawn.manual_seed(combine_seeds(self.seed, self.epoch))
        if self._sampler is not None:
            yield from self._of_samples(self._sampler)
        elif self._stream is not None:
            yield from self._of_stream(self._stream)
        else:
            yield from self._of_any()
        self._tell(0)
        self.set_epoch(self.epoch + 1)

    def _tell(self, total: int) -> None:
        """Record whether every replica has all of a batch."""
        self.whole = self._sharing is not None and self._sharing.is_whole(total)
        if self._model is not None:
            self._model.pass_whole(self.whole)

    def _of_samples(self, sampler: ReplicaBatchSampler) -> Iterator[Any]:
        sampler.epoch, sampler.start = self.epoch, self.row
        if self._drawn_by_row is not None:
            self._drawn_by_row.epoch, self._drawn_by_row.seed = self.epoch, self.seed
        for batch in self.data:
            total = sampler.count_at(self.row)
            batch = fill(batch, self.ignore, sampler.sharing.padding(total))
            self.row, self.total = self.row + total, total
            self._tell(total)
            yield batch

    def _of_stream(self, stream: Stream) -> Iterator[Any]:
        stream.epoch, stream.skip, stream.state = self.epoch, self.row, self._state
        known: StreamShare
        for batch, known in self.data:
            batch = fill(batch, self.ignore, known.padding)
            self.row, self.total, self._state = self.row + known.total, known.total, known.state
            self._tell(known.total)
            yield batch

    def _of_any(self) -> Iterator[Any]:
        parts: list[Any] = [getattr(self.data, name, None) for name in ("sampler", "batch_sampler", "dataset")]
        for source in (self.data, *parts):
            if hasattr(source, "set_epoch"):
                source.set_epoch(self.epoch)
        seen = self.row
        for number, batch in enumerate(self.data):
            if number >= seen:
                self.row = number + 1
                yield batch

    def __len__(self) -> int:
        """The number of batches of a full epoch, if known."""
        if self._stream is None:
            return len(self.data)  # type: ignore[arg-type]
        return self._stream.sharing.batches(len(self._stream.dataset))  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of another epoch; the same epoch continues where the loop is."""
        if epoch != self.epoch:
            self.epoch, self.row, self._state = epoch, 0, None

    def rewind(self) -> None:
        """Back to the beginning of this epoch."""
        self.row, self._state = 0, None

    def state_dict(self) -> dict[str, Any]:
        """The position of the loop, equal on all ranks."""
        state = self._sampler.state_dict() if self._sampler is not None else {"seed": self.seed}
        return {**state, "epoch": self.epoch, "row": self.row, "counts": self._counts, "stream": self._state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position, with this or another number of data-parallel replicas."""
        if state.get("counts") != self._counts:
            raise InputError(
                f"the position in the data was saved in {state.get('counts')}, but this data counts "
                f"{self._counts}: use the same kind of data"
            )
        if self._sampler is not None:
            self._sampler.load_state_dict(state)
        self.seed, self.epoch, self.row = int(state["seed"]), int(state["epoch"]), int(state["row"])
        self._state = state["stream"]

    @property
    def _counts(self) -> str:
        if self._sampler is not None:
            return "rows"  # part of saved checkpoints
        return "batches" if self._stream is None else "rows of a stream"


def loader(
    dataset: Any, batch: int, *, model: nn.Module | None = None, rank: int | None = None,
    ranks: int | None = None, shuffle: bool = False, seed: int = 0, last: Last = "keep", ignore: Ignore | None = None,
    workers: int = 0, collate: Collate = default_collate, draw_by_row: bool = False,
    sampler: Iterable[int] | None = None, **options: Any,
) -> Loader:  # fmt: skip
    """Batches of a dataset, map-style or iterable, for this rank.

    batch    samples of a global batch, over all data-parallel replicas
    model    the result of `sw.parallelize`: it and its `inputs` decide which samples this rank gets. Without it
             the global batch, or the share of `rank` of `ranks`. A last batch that replicas can't share
             evenly goes to every rank, and the model knows: results are those of one device
    shuffle  a new order every epoch, the same on all ranks, from `seed` and the epoch (map-style datasets only)
    last     treatment of a smaller last batch: see `shardwright.data.Last`
    ignore   with last="pad": how labels of padding samples are marked, such as {"labels": -100}
    workers  processes that prefetch
    draw_by_row
             augmentation of a sample depends on seed, epoch and sample alone: the same after a stop and with any
             number of workers and ranks
    sampler  a custom order of samples instead of `shuffle`; it draws from seed and epoch
    options  for `torch.utils.data.DataLoader`
    """
    if (rank is None) != (ranks is None):
        raise InputError(f"rank={rank}, ranks={ranks}: pass both or none")
    mine, of = place_of(model) if rank is None or ranks is None else (rank, ranks)
    if last == "keep" and rank is None:
        last = "whole"
    if is_stream(dataset):
        _check_stream(shuffle, draw_by_row, sampler)
        stream = Stream(dataset, batch, rank=mine, ranks=of, last=last)
        join: Any = ShareCollate(collate=collate)
        gives = DataLoader(stream, batch_size=None, num_workers=workers, collate_fn=join, **options)
        return Loader(gives, seed=seed, ignore=ignore, model=model)
    if draw_by_row:
        dataset = SeededPerSample(dataset, seed)
    if sampler is None:
        batches = ReplicaBatchSampler(len(dataset), batch, rank=mine, ranks=of, shuffle=shuffle, seed=seed, last=last)
    elif shuffle:
        raise InputError("a sampler sets the order of samples; leave out shuffle=True")
    else:
        batches = SampledBatches(sampler, batch, rank=mine, ranks=of, seed=seed, last=last)
    bound = SampleCollate(collate=collate, dataset=dataset)
    data = DataLoader(dataset, batch_sampler=batches, num_workers=workers, collate_fn=bound, **options)
    return Loader(data, seed=seed, ignore=ignore, model=model)


def _check_stream(shuffle: bool, draw_by_row: bool, sampler: Iterable[int] | None) -> None:
    if shuffle:
        raise InputError("shuffle=True needs a map-style dataset; let the stream shuffle itself")
    if draw_by_row:
        raise InputError("draw_by_row=True needs a map-style dataset; a stream has its own randomness")
    if sampler is not None:
        raise InputError("a sampler needs a map-style dataset; a stream has its own order")


def place_of(model: nn.Module | None) -> tuple[int, int]:
    """Which share of a batch this rank passes to a model, and of how many."""
    if not isinstance(model, ParallelModel) or model.input_mode == "global":
        return 0, 1
    if model.input_mode == "per_rank":
        world = here()
        return world.rank, world.size
    return model.data_rank, model.data_size

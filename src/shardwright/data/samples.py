"""Which samples of a dataset a data-parallel replica takes, batch by batch.

One order of all samples, the same on every rank, made of the seed and the epoch alone. A global
batch is the next run of that order, and the groups share it, each its run:

    order       7 2 9 4 | 0 5 8 1 | 3 6          ten samples, batches of four
    group 0     7 2       0 5       3
    group 1         9 4       8 1     6

So the global batches don't depend on the number of groups, and a place in the order, counted in
rows, means the same for any number of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Sampler

from ..errors import InputError, raise_all
from ..runtime.collectives.objects import text_digest

Last = Literal["keep", "drop", "pad", "whole"]
"""What is done with the last batch of an epoch, if it is smaller than the others.

keep    it is smaller; groups may have unequal shares of it, or none (see `share`)
whole   it is smaller; if the groups can't share it evenly, every group gets all of it
drop    it is left out
pad     every group gets as many rows; rows of the same batch stand in the places that are left over
"""


def share_of_samples(total: int, rank: int, ranks: int) -> range:
    """Which of `total` rows a group takes: a run of them, cut as torch.chunk cuts, the last ones maybe empty."""
    size = -(-total // ranks)
    return range(min(rank * size, total), min((rank + 1) * size, total))


def combine_seeds(*numbers: int) -> int:
    """One number of several."""
    return text_digest(" ".join(map(str, numbers)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """Who takes what of a global batch: `rank` of `ranks` groups."""

    batch: int
    rank: int
    ranks: int
    last: Last

    def __post_init__(self) -> None:
        faults = []
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            faults.append(f"rank={self.rank} of ranks={self.ranks}: the first is from 0 to ranks - 1")
        if self.batch < 1:
            faults.append(f"batch={self.batch}: a global batch has at least one row")
        elif self.ranks >= 1 and self.batch % self.ranks:
            near = self.batch + -self.batch % self.ranks
            faults.append(f"batch={self.batch} does not divide by the {self.ranks} groups that share it; take {near}")
        if self.last not in get_args(Last):
            faults.append(f"last={self.last!r}: it is one of {', '.join(get_args(Last))}")
        raise_all(InputError, "these rows can't be shared:", faults)

    def count(self, left: int) -> int:
        """How many rows the next global batch has, if so many are left; 0 at the end."""
        return 0 if left < self.batch and self.last == "drop" else max(0, min(left, self.batch))

    def is_whole(self, total: int) -> bool:
        """Whether every replica gets all of a batch of so many samples."""
        return self.last == "whole" and total % self.ranks > 0

    def mine(self, total: int) -> range:
        """The samples that this replica takes of a batch of so many."""
        return range(total) if self.is_whole(total) else share_of_samples(total, self.rank, self.ranks)

    def padding(self, total: int) -> int:
        """How many padding samples this replica needs, to have as many as the first."""
        return len(share_of_samples(total, 0, self.ranks)) - len(self.mine(total)) if self.last == "pad" else 0

    def batches(self, size: int) -> int:
        """How many batches so many samples are."""
        return size // self.batch if self.last == "drop" else -(-size // self.batch)


class ReplicaBatchSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`: this group's rows of every global batch.

    size     samples of the dataset
    batch    samples of a global batch, over all replicas
    rank     which data-parallel group this is (`model.data_rank`), of how many `ranks` (`model.data_size`)
    shuffle  whether every epoch has an order of its own
    last     what is done with a smaller last batch: see `Last`

    `epoch` and `start`, the row of the epoch from which to go on, are what `iter` begins with.
    """

    def __init__(
        self, size: int, batch: int, *, rank: int = 0, ranks: int = 1, shuffle: bool = False, seed: int = 0,
        last: Last = "keep",
    ) -> None:  # fmt: skip
        self.sharing = BatchShare(batch=batch, rank=rank, ranks=ranks, last=last)
        if size < 0:
            raise InputError(f"a dataset of {size} rows: give its length")
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.epoch = self.start = 0

    def order(self) -> torch.Tensor:
        """All samples in the order of this epoch: the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(combine_seeds(self.seed, self.epoch)))

    def count_at(self, start: int) -> int:
        """How many rows the global batch has that begins with this row; 0 at the end."""
        return self.sharing.count(self.size - start)

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self.start
        while total := self.count_at(start):
            mine = order[start : start + total][list(self.sharing.mine(total))].tolist()
            yield mine + [int(order[start + at % total]) for at in range(self.sharing.padding(total))]
            start += total

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return self.sharing.batches(self.size)

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, from its beginning. The same epoch resumes where it was."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where `iter` begins. A loader knows how far the loop has come."""
        return {
            "epoch": self.epoch, "row": self.start, "seed": self.seed, "shuffle": self.shuffle, "size": self.size,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a place. The order is that of the saved seed."""
        faults = [
            f"it was saved with {key}={state[key]!r}, and here is {key}={mine!r}"
            for key, mine in (("size", self.size), ("shuffle", self.shuffle))
            if state[key] != mine
        ]
        raise_all(InputError, "the place in the data is that of another order:", faults)
        self.epoch, self.start, self.seed = int(state["epoch"]), int(state["row"]), int(state["seed"])


class SampledBatches(ReplicaBatchSampler):
    """Rows in the order of a sampler. What that draws follows from the seed and the epoch, alike on all ranks."""

    def __init__(self, sampler: Iterable[int], batch: int, *, rank: int, ranks: int, last: Last, seed: int) -> None:
        if not isinstance(sampler, Sized):
            raise InputError(f"{type(sampler).__name__} does not say how many rows it gives: a sampler needs __len__")
        super().__init__(len(sampler), batch, rank=rank, ranks=ranks, seed=seed, last=last)
        self.sampler = sampler

    def order(self) -> torch.Tensor:
        """The sampler's samples of this epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(combine_seeds(self.seed, self.epoch))
            return torch.tensor(list(self.sampler))

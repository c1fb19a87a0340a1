"""Which samples of a dataset a data-parallel replica takes, batch by batch.

All samples have one order, the same on every rank, from the seed and the epoch alone. A global
batch is the next run of that order, and each replica takes a contiguous share:

    order       7 2 9 4 | 0 5 8 1 | 3 6          ten samples, batches of four
    replica 0   7 2       0 5       3
    replica 1       9 4       8 1     6

So the global batches don't depend on the number of replicas, and a position in the order, counted
in samples, means the same for any number of them.
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
"""Treatment of a smaller last batch of an epoch.

keep    it is smaller; replicas may have unequal shares of it, or none
whole   it is smaller; if replicas can't share it evenly, every replica gets all of it
drop    it is dropped
pad     every replica gets equally many; samples of the same batch are repeated as padding
"""


def share_of_samples(total: int, rank: int, ranks: int) -> range:
    """The share of a replica in `total` samples: contiguous, split like torch.chunk, the last ones maybe empty."""
    size = -(-total // ranks)
    return range(min(rank * size, total), min((rank + 1) * size, total))


def combine_seeds(*numbers: int) -> int:
    """One seed from several numbers."""
    return text_digest(" ".join(map(str, numbers)))


def shuffled(size: int, shuffle: bool, seed: int, epoch: int) -> torch.Tensor:
    """An order of `size` samples, equal on every rank: of the seed and the epoch, or as they are."""
    if not shuffle:
        return torch.arange(size)
    return torch.randperm(size, generator=torch.Generator().manual_seed(combine_seeds(seed, epoch)))


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchShare:
    """The share of replica `rank` of `ranks` in a global batch."""

    batch: int
    rank: int
    ranks: int
    last: Last

    def __post_init__(self) -> None:
        faults = []
        if self.ranks < 1 or not 0 <= self.rank < self.ranks:
            faults.append(f"rank={self.rank} of ranks={self.ranks}: rank must be from 0 to ranks - 1")
        if self.batch < 1:
            faults.append(f"batch={self.batch}: a global batch has at least one sample")
        elif self.ranks >= 1 and self.batch % self.ranks:
            near = self.batch + -self.batch % self.ranks
            faults.append(f"batch={self.batch} does not divide by the {self.ranks} replicas that share it; use {near}")
        if self.last not in get_args(Last):
            faults.append(f"last={self.last!r}: must be one of {', '.join(get_args(Last))}")
        raise_all(InputError, "these samples can't be shared:", faults)

    def count(self, left: int) -> int:
        """The size of the next global batch, with `left` samples left; 0 at the end."""
        return 0 if left < self.batch and self.last == "drop" else max(0, min(left, self.batch))

    def is_whole(self, total: int) -> bool:
        """Whether every replica gets all of a batch of `total` samples."""
        return self.last == "whole" and total % self.ranks > 0

    def mine(self, total: int) -> range:
        """The samples of this replica in a batch of `total`."""
        return range(total) if self.is_whole(total) else share_of_samples(total, self.rank, self.ranks)

    def padding(self, total: int) -> int:
        """How many padding samples this replica needs, to have as many as the first."""
        return len(share_of_samples(total, 0, self.ranks)) - len(self.mine(total)) if self.last == "pad" else 0

    def batches(self, size: int) -> int:
        """The number of batches in `size` samples."""
        return size // self.batch if self.last == "drop" else -(-size // self.batch)


class ReplicaBatchSampler(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`: this replica's samples of every global batch.

    size     samples of the dataset
    batch    samples of a global batch, over all replicas
    rank     which data-parallel replica this is (`model.data_rank`), of how many `ranks` (`model.data_size`)
    shuffle  whether every epoch has a new order
    last     treatment of a smaller last batch: see `Last`

    `iter` begins at `epoch` and `start`, the sample of the epoch from which to resume.
    """

    def __init__(
        self, size: int, batch: int, *, rank: int = 0, ranks: int = 1, shuffle: bool = False, seed: int = 0,
        last: Last = "keep",
    ) -> None:  # fmt: skip
        self.sharing = BatchShare(batch=batch, rank=rank, ranks=ranks, last=last)
        if size < 0:
            raise InputError(f"a dataset of {size} samples: pass its length")
        self.size, self.shuffle, self.seed = size, shuffle, seed
        self.epoch = self.start = 0

    def order(self) -> torch.Tensor:
        """All samples in the order of this epoch, equal on every rank."""
        return shuffled(self.size, self.shuffle, self.seed, self.epoch)

    def count_at(self, start: int) -> int:
        """The size of the global batch that begins at this sample; 0 at the end."""
        return self.sharing.count(self.size - start)

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self.start
        while total := self.count_at(start):
            mine = order[start : start + total][list(self.sharing.mine(total))].tolist()
            yield mine + [int(order[start + at % total]) for at in range(self.sharing.padding(total))]
            start += total

    def __len__(self) -> int:
        """The number of batches of a full epoch."""
        return self.sharing.batches(self.size)

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of another epoch; the same epoch continues where it was."""
        if epoch != self.epoch:
            self.epoch, self.start = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """Where `iter` begins. A `Loader` knows the position of the loop."""
        return {
            "epoch": self.epoch, "row": self.start, "seed": self.seed, "shuffle": self.shuffle, "size": self.size,
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a position, in the order of the saved seed."""
        faults = [
            f"saved with {key}={state[key]!r}, but here {key}={mine!r}"
            for key, mine in (("size", self.size), ("shuffle", self.shuffle))
            if state[key] != mine
        ]
        raise_all(InputError, "the position in the data belongs to another order:", faults)
        self.epoch, self.start, self.seed = int(state["epoch"]), int(state["row"]), int(state["seed"])


class SampledBatches(ReplicaBatchSampler):
    """Samples in the order of a sampler, which draws from the seed and the epoch, alike on all ranks."""

    def __init__(self, sampler: Iterable[int], batch: int, *, rank: int, ranks: int, last: Last, seed: int) -> None:
        if not isinstance(sampler, Sized):
            raise InputError(f"{type(sampler).__name__} has no length: a sampler needs __len__")
        super().__init__(len(sampler), batch, rank=rank, ranks=ranks, seed=seed, last=last)
        self.sampler = sampler

    def order(self) -> torch.Tensor:
        """The sampler's samples of this epoch."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(self.epoch)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(combine_seeds(self.seed, self.epoch))
            return torch.tensor(list(self.sampler))

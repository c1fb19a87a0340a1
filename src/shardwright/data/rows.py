"""Which rows of a dataset a data-parallel group takes, batch by batch.

One order of all rows, the same on every rank, made of the seed and the epoch alone. A global
batch is the next run of that order, and the groups share it, each its run:

    order       7 2 9 4 | 0 5 8 1 | 3 6          ten rows, batches of four
    group 0     7 2       0 5       3
    group 1         9 4       8 1     6

So the global batches don't depend on the number of groups, and a place in the order, counted in
rows, means the same for any number of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, get_args

import torch
from torch.utils.data import Sampler

from ..errors import InputError, raise_all

Last = Literal["keep", "drop", "pad"]
"""What is done with the last batch of an epoch, if it is smaller than the others.

keep    it is smaller; groups may have unequal shares of it, or none (see `share`)
drop    it is left out
pad     every group gets as many rows; rows of the same batch stand in the places that are left over
"""


def share(total: int, rank: int, ranks: int) -> range:
    """Which of `total` rows a group takes: a run of them, cut as torch.chunk cuts, the last ones maybe empty."""
    size = -(-total // ranks)
    return range(min(rank * size, total), min((rank + 1) * size, total))


def seed_of(seed: int, epoch: int) -> int:
    """One number of two."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {epoch}".encode(), digest_size=7).digest(), "big")


class Rows(Sampler[list[int]]):
    """A batch sampler for `torch.utils.data.DataLoader`: this group's rows of every global batch.

    size     rows of the dataset
    batch    rows of a global batch, over all groups
    rank     which data-parallel group this is (`model.data_rank`), of how many `ranks` (`model.data_size`)
    shuffle  whether every epoch has an order of its own
    last     what is done with a smaller last batch: see `Last`

    `epoch` and `start`, the row of the epoch from which to go on, are what `iter` begins with.
    """

    def __init__(
        self, size: int, batch: int, *, rank: int = 0, ranks: int = 1, shuffle: bool = False, seed: int = 0,
        last: Last = "keep",
    ) -> None:  # fmt: skip
        check_sharing(batch, rank, ranks, last)
        if size < 0:
            raise InputError(f"a dataset of {size} rows: give its length")
        self.size, self.batch, self.rank, self.ranks = size, batch, rank, ranks
        self.shuffle, self.seed, self.last = shuffle, seed, last
        self.epoch = self.start = 0

    def order(self) -> torch.Tensor:
        """All rows in the order of this epoch: the same on every rank."""
        if not self.shuffle:
            return torch.arange(self.size)
        return torch.randperm(self.size, generator=torch.Generator().manual_seed(seed_of(self.seed, self.epoch)))

    def count_at(self, start: int) -> int:
        """How many rows the global batch has that begins with this row; 0 at the end."""
        left = max(0, self.size - start)
        return 0 if left < self.batch and self.last == "drop" else min(left, self.batch)

    def padding(self, total: int) -> int:
        """How many rows of this group's share of a batch of so many rows only fill it up."""
        if self.last != "pad":
            return 0
        return -(-total // self.ranks) - len(share(total, self.rank, self.ranks))

    def __iter__(self) -> Iterator[list[int]]:
        order, start = self.order(), self.start
        while total := self.count_at(start):
            mine = [int(order[start + row]) for row in share(total, self.rank, self.ranks)]
            yield mine + [int(order[start + at % total]) for at in range(self.padding(total))]
            start += total

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        return self.size // self.batch if self.last == "drop" else -(-self.size // self.batch)

    def set_epoch(self, epoch: int) -> None:
        """Another epoch, from its beginning. The same epoch goes on where it was."""
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


def check_sharing(batch: int, rank: int, ranks: int, last: Last) -> None:
    """Refuse numbers that make no sense together."""
    faults = []
    if ranks < 1 or not 0 <= rank < ranks:
        faults.append(f"rank={rank} of ranks={ranks}: the first is from 0 to ranks - 1")
    if batch < 1:
        faults.append(f"batch={batch}: a global batch has at least one row")
    elif ranks >= 1 and batch % ranks:
        near = batch + -batch % ranks
        faults.append(f"batch={batch} does not divide by the {ranks} groups that share it; take {near}")
    if last not in get_args(Last):
        faults.append(f"last={last!r}: it is one of {', '.join(get_args(Last))}")
    raise_all(InputError, "these rows can't be shared:", faults)

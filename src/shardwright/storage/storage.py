"""What a kind of parameter storage has to answer.

    kind         parameter    gradient     optimizer state   forward      backward                     update
    ----------   ----------   ----------   ---------------   ----------   --------------------------   ----------
    Replicated   replicated   replicated   replicated                     all_reduce
    Zero1        replicated   replicated   sharded                        all_reduce                   all_gather
    Zero2        replicated   sharded      sharded                        reduce_scatter               all_gather
    Zero3        sharded      sharded      sharded           all_gather   all_gather, reduce_scatter

Nobody else compares kinds: whoever needs to know something about a storage asks it. All kinds shard in the same way
(`storage_layout`), so that an optimizer state saved under one fits another.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple


class StorageCollective(NamedTuple):
    """One collective that a parameter needs in a training step."""

    phase: Literal["forward", "backward", "update"]  # what it overlaps with; an update waits for it
    collective: Literal["all_gather", "all_reduce", "reduce_scatter"]
    axes: tuple[str, ...]
    of_gradient: bool = False  # sent in the dtype that gradients are summed in, else in that of compute
    of_share: bool = False  # of the rank's share alone, else of all that it computes with


class StoredElements(NamedTuple):
    """How many elements of a parameter a device stores."""

    parameter: float
    gradient: float
    state: float  # with optimizer state on the device
    updated: float  # that this rank's optimizer updates, wherever its state is


@dataclass(frozen=True, slots=True)
class Storage:
    """A kind of storage, over the mesh axes along which it shards.

    name             in plan strings ("zero3=8") and reports
    symbol           in plan files and generated code: {"dp": 3}; the name, for a kind that is no level of ZeRO
    title            in reports: "ZeRO-3 over dp"
    runtime          "module:class" that sums gradients (a `GradientBucket`), or, where the parameter is sharded too,
                     that gathers it (a `UnitShards`)
    update_copies    how often the update copies what it updates, such as to a host and back
    shard_device     where the shard is that the optimizer updates, if not beside the parameter
    """

    axes: tuple[str, ...] = ()

    name: ClassVar[str]
    symbol: ClassVar[int | str]
    title: ClassVar[str]
    runtime: ClassVar[str]
    shards_parameter: ClassVar[bool] = False
    shards_gradient: ClassVar[bool] = False
    shards_state: ClassVar[bool] = False
    update_copies: ClassVar[int] = 0
    shard_device: ClassVar[str | None] = None

    # -- what is stored ------------------------------------------------------------------

    def stored(self, count: float, parts: int) -> StoredElements:
        """What a device stores of a parameter of which it computes with `count` elements, shared by `parts` ranks."""
        share = count / parts
        state = share if self.shards_state else count
        return StoredElements(
            parameter=share if self.shards_parameter else count,
            gradient=share if self.shards_gradient else count,
            state=state,
            updated=state,
        )

    def parts(self, sizes: Mapping[str, int]) -> int:
        """Over how many ranks it shards."""
        return math.prod(sizes[axis] for axis in self.axes)

    @property
    def updates_shard(self) -> bool:
        """Whether the optimizer updates a shard of what a rank computes with, and the rest comes from other ranks."""
        return self.shards_state and not self.shards_parameter

    @classmethod
    def sharded(cls) -> tuple[str, ...]:
        """What is sharded, in words."""
        every = (("parameter", cls.shards_parameter), ("gradient", cls.shards_gradient),
                 ("optimizer state", cls.shards_state))  # fmt: skip
        return tuple(name for name, is_sharded in every if is_sharded)

    @classmethod
    def describe(cls) -> str:
        """ "parameter, gradient and optimizer state"."""
        *others, last = cls.sharded()
        return f"{', '.join(others)} and {last}" if others else last

    # -- what is sent --------------------------------------------------------------------

    def collectives(self, summed: tuple[str, ...], trainable: bool, backward: bool) -> Iterator[StorageCollective]:
        """The collectives of a step; a gradient is a pending sum over the axes `summed`."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it sends")

    def while_accumulating(self) -> Storage:
        """How it stores gradients while microbatches of a pipeline still add to them."""
        return self

    # -- its axes ------------------------------------------------------------------------

    def renamed(self, names: Mapping[str, str]) -> Storage:
        return type(self)(tuple(names[axis] for axis in self.axes))

    def written(self) -> dict[str, int | str]:
        """As plan files and generated code have it: {"dp": 3}, or {} if it is replicated."""
        return dict.fromkeys(self.axes, self.symbol)

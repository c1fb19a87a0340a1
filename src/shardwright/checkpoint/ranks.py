"""The ranks that save and load together, on a process group of their own.

A save may be written while training continues, and its messages must not mix with the collectives
of a step. A failure on one rank is an error on all.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..errors import CheckpointError, ShardwrightError
from ..runtime.faults import flight_recorder
from ..runtime.faults.watch import report_failure
from ..runtime.world import cpu_group

T = TypeVar("T")
PATIENCE = timedelta(hours=2)  # a rank may have much more to write than another


class UnfinishedSave(Protocol):
    """A save that may still be in progress."""

    def wait(self) -> Any: ...


class CheckpointRanks:
    """All ranks, or the only one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = dist.get_rank() if group is not None else 0
        self.size = dist.get_world_size() if group is not None else 1
        self.under_way: UnfinishedSave | None = None

    @property
    def first(self) -> bool:
        return self.rank == 0

    def settle(self) -> None:
        """Wait for the pending save, and raise its error if it failed."""
        pending, self.under_way = self.under_way, None
        if pending is not None:
            pending.wait()

    @report_failure
    def gather(self, value: T) -> list[T]:
        """Gather to the first rank; empty elsewhere."""
        if self._group is None:
            return [value]
        values: list[Any] | None = [None] * self.size if self.first else None
        flight_recorder.enter_beside("gather", self._group, "what ranks save or load")
        dist.gather_object(value, values, dst=0, group=self._group)
        return values or []

    @report_failure
    def deal(self, values: list[T]) -> T:
        """Scatter from the first rank."""
        if self._group is None:
            return values[0]
        received: list[Any] = [None]
        flight_recorder.enter_beside("scatter", self._group, "what ranks save or load")
        dist.scatter_object_list(received, values if self.first else None, src=0, group=self._group)
        return received[0]  # type: ignore[no-any-return]

    def together(self, do: Callable[[], T]) -> T:
        """Run a function on every rank; if it fails on any, raise on all."""
        result: T | None = None
        error: Exception | None = None
        try:
            result = do()
        except Exception as caught:
            error = caught
        messages = self.gather(None if error is None else _message(error))
        faults = self.deal([{rank: text for rank, text in enumerate(messages) if text is not None}] * self.size)
        if not faults:
            return result  # type: ignore[return-value]
        everywhere = len(faults) == self.size
        if error is not None and everywhere and (self.size == 1 or isinstance(error, ShardwrightError)):
            raise error
        lines = [f"rank {rank}: {text}" for rank, text in faults.items()]
        if len(set(faults.values())) == 1:
            lines = [next(iter(faults.values()))]
        raise CheckpointError("\n".join(lines)) from error


def _message(error: Exception) -> str:
    return str(error) if isinstance(error, ShardwrightError) else f"{type(error).__name__}: {error}"


_meetings: WeakKeyDictionary[dist.ProcessGroup, CheckpointRanks] = WeakKeyDictionary()
_alone = CheckpointRanks(None)


def checkpoint_ranks() -> CheckpointRanks:
    """The `CheckpointRanks` of this run. All ranks must call it."""
    world = dist.group.WORLD if dist.is_initialized() else None
    if world is None:
        return _alone
    if world not in _meetings:
        _meetings[world] = CheckpointRanks(cpu_group(PATIENCE))
    return _meetings[world]

"""What all ranks must decide alike, such as to stop: agreed on asynchronously during a step, waited for at its end.

It runs on the CPU and on its own process group, so it neither waits for a GPU nor mixes with the
collectives of the model.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from ..runtime.faults.watch import report_failure
from ..runtime.world import cpu_group


class Agreement:
    """Max and sum over all ranks. All ranks build it and call its methods together."""

    def __init__(self) -> None:
        self._group = cpu_group()
        self._sent: torch.Tensor | None = None
        self._work: Any = None

    def ask(self, number: float) -> None:
        """Start an all_reduce (max) of this rank's number, without waiting."""
        self._sent = torch.tensor([number], dtype=torch.float64)
        if self._group is not None:
            self._work = dist.all_reduce(self._sent, dist.ReduceOp.MAX, group=self._group, async_op=True)

    @report_failure
    def answer(self) -> float:
        """Wait for the maximum."""
        if self._sent is None:
            return 0.0
        if self._work is not None:
            self._work.wait()
        agreed, self._sent, self._work = float(self._sent[0]), None, None
        return agreed

    @report_failure
    def largest(self, number: float) -> float:
        """The maximum over all ranks; a pending `ask` may be in flight."""
        if self._group is None:
            return number
        tensor = torch.tensor([number], dtype=torch.float64)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, group=self._group)
        return float(tensor[0])

    @report_failure
    def summed(self, numbers: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks."""
        totals = numbers.double().cpu().clone()
        if self._group is not None:
            dist.all_reduce(totals, group=self._group)
        return totals

    @report_failure
    def all_gather_texts(self, text: str) -> list[str]:
        """The texts of all ranks without repeats, in the order of ranks."""
        if self._group is None:
            return [text] if text else []
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, text, group=self._group)
        return [message for message in dict.fromkeys(every) if message]

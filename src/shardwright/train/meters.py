"""Throughput of a run: samples and tokens per second, MFU, memory.

Time spent in validation and saving is left out. MFU is the arithmetic of the model's matmuls, forward and backward
(`cost.training_flops`: without recomputation), over the peak of all devices in the dtype of the run.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..cluster import Cluster
from ..cost.time import units
from ..runtime import accelerator

GIB = 2.0**30


class Meter:
    """Counts samples and tokens between two reads."""

    def __init__(
        self, *, flops_per_row: float | None = None, peak: float | None = None, predicted: float | None = None
    ) -> None:
        """`peak` is the sum over all devices; without it, or without flops, there is no MFU. `predicted`: of a step."""
        self.flops_per_row, self.peak, self.predicted = flops_per_row, peak, predicted
        self._rows = self._tokens = self._steps = 0
        self._began = time.perf_counter()

    def count(self, rows: int, tokens: int) -> None:
        """One step is done."""
        self._rows, self._tokens, self._steps = self._rows + rows, self._tokens + tokens, self._steps + 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time in this context is not counted as training."""
        before = time.perf_counter()
        yield
        self._began += time.perf_counter() - before

    def read(self) -> dict[str, float]:
        """The throughput since the last read; empty if no step was done."""
        seconds = time.perf_counter() - self._began
        rows, tokens, steps = self._rows, self._tokens, self._steps
        self._rows = self._tokens = self._steps = 0
        self._began = time.perf_counter()
        if not steps or seconds <= 0:
            return {}
        metrics = {"seconds_per_step": seconds / steps, "rows_per_second": rows / seconds}
        if self.predicted is not None:
            metrics["predicted_seconds_per_step"] = self.predicted
        if tokens:
            metrics["tokens_per_second"] = tokens / seconds
        if self.flops_per_row is not None and self.peak:
            metrics["mfu"] = self.flops_per_row * rows / seconds / self.peak
        return metrics


def peak_of(cluster: Cluster, dtype: str, size: int) -> float:
    """Peak flop/s of the first `size` devices of a cluster in a dtype."""
    devices = [cluster.device(rank) for rank in range(size)]
    return sum(device.peak(units(device, dtype)) for device in devices)


def memory_used(device: torch.device) -> float:
    """Peak memory of this process in GiB: of its accelerator, or of the host without one."""
    if device.type != "cpu":
        return accelerator.peak_memory_of(device) / GIB
    most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return most * (1 if sys.platform == "darwin" else 1024) / GIB

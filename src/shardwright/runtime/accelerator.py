"""The one place that knows which kind of accelerator this machine has, and what it can do.

Everything is asked of `torch.accelerator` and of the device's own module (`torch.get_device_module`), so that CUDA,
ROCm, XPU, NPUs and devices that a package registers are used in the same way. Elsewhere in the package a device is a
`torch.device`, and no kind of accelerator is named (`tests/house/test_accelerator.py`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwright.errors import RankError


def kind() -> str:
    """The type of device that models run on here: that of the accelerator, or "cpu" without one."""
    device = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if device is None else device.type


def is_available() -> bool:
    return kind() != "cpu"


def count_of(device_type: str) -> int | None:
    """How many devices of a type this machine has; None where ranks can share one."""
    return None if device_type == "cpu" else torch.get_device_module(device_type).device_count()


def device_of(local_rank: int, device_type: str | None = None) -> torch.device:
    """The device of a rank of this machine: an accelerator if there is one, unless a type is passed.

    Schedulers that show each process only its own device number it 0 in all of them.
    """
    own = device_type or kind()
    count = count_of(own)
    if count is None:
        return torch.device(own)
    if local_rank >= count > 1:
        raise RankError(
            f"rank {local_rank} of this machine has no device: there are {count} of type {own}; start at most one "
            f"rank for each (torchrun --nproc-per-node {count}), or show more of them to this process"
        )
    return torch.device(own, local_rank if local_rank < count else 0)


def select(device: torch.device) -> None:
    """Make a device the current one of this process: where backends allocate, and barriers run."""
    if device.type != "cpu":
        torch.accelerator.set_device_index(device)


def backend_for(device_type: str) -> str:
    """The backends for devices of a type; small objects always go over the CPU."""
    own = dist.get_default_backend_for_device(device_type)
    return own if device_type == "cpu" else f"cpu:gloo,{device_type}:{own}"


def has_backend(device_type: str) -> bool:
    """Whether the default process group sends tensors of this device by the backend that is made for it."""
    backends = dict(pair.split(":", 1) for pair in str(dist.get_backend_config()).split(","))
    return backends.get(device_type) == dist.get_default_backend_for_device(device_type)


# -- properties of a device -------------------------------------------------------------------------


def name_of(device: torch.device) -> str:
    """What its maker calls it; its type if nobody says."""
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if device.type == "cpu" or name is None else str(name(device))


def memory_of(device: torch.device) -> int:
    """Bytes on the device; for a CPU those of the machine."""
    if device.type == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return torch.accelerator.get_memory_info(device)[1]


def peak_memory_of(device: torch.device) -> int:
    """The most bytes that this process has allocated on the device."""
    return torch.accelerator.max_memory_allocated(device)


def flashes(device: torch.device) -> bool:
    """Whether torch's flash attention, `_scaled_dot_product_flash_attention`, runs on the device."""
    return device.type == "cuda"


# -- time -------------------------------------------------------------------------------------------


def seconds_on(device: torch.device, run: Callable[[], object]) -> float:
    """How long the device takes for what `run` launches."""
    start, end = (torch.Event(device, enable_timing=True) for _ in range(2))
    torch.accelerator.synchronize(device)
    start.record()
    run()
    end.record()
    torch.accelerator.synchronize(device)
    return float(start.elapsed_time(end)) / 1e3


Mark = float | torch.Event
"""A moment of a device: of an accelerator when it gets there, since it runs behind the program that feeds it."""


def mark(device: torch.device) -> Mark:
    """Now, on the device's current stream. Nothing waits."""
    if device.type == "cpu":
        return time.perf_counter()
    event = torch.Event(device, enable_timing=True)
    event.record()
    return event


def seconds_between(start: Mark, end: Mark) -> float | None:
    """The time from mark to mark; None while the device has not got there."""
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float) and isinstance(end, float), "marks of two devices"
        return end - start
    return float(start.elapsed_time(end)) / 1e3 if end.query() else None


# -- random numbers ---------------------------------------------------------------------------------


def generator_state() -> Tensor | None:
    """The state of the current accelerator's generator; None without an accelerator."""
    return torch.get_device_module(kind()).get_rng_state() if is_available() else None


def set_generator_state(state: Tensor) -> None:
    """Continue from a state of this type of accelerator."""
    torch.get_device_module(kind()).set_rng_state(state)

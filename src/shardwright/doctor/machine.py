"""What this machine is: software, devices, links, cores, memory and limits; and what of it will cause trouble."""

from __future__ import annotations

import os
import platform
import resource
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from ..runtime import accelerator

GIB = 2**30
FILES = 4096  # open files: sockets to every rank, loader workers and checkpoint files add up
SHARED = GIB  # bytes of /dev/shm: loader workers pass batches through it
SETTINGS = ("OMP_", "MKL_", "NCCL_", "GLOO_", "TORCH_", "SHARDWRIGHT_")
SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Facts by section, and warnings with their remedy. No names of hosts or users: it is pasted into issues."""

    facts: Mapping[str, Mapping[str, str]]
    links: str  # as the vendor's tool draws them; "" without one
    warnings: tuple[str, ...]


def look_up(device: str, ranks: int) -> Machine:
    """This machine, for so many ranks on devices of a type."""
    warnings: list[str] = []
    facts = {
        "software": _software(),
        "devices": _devices(device),
        "processor": _processor(device, ranks, warnings),
        "memory": _memory(warnings),
        "limits": _limits(device, warnings),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith(SETTINGS) and not any(word in name for word in SECRET)
        },
    }
    return Machine(facts=facts, links=accelerator.links(), warnings=tuple(warnings))


def _software() -> dict[str, str]:
    return {
        "shardwright": version("shardwright"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        **accelerator.versions(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }


def _devices(device: str) -> dict[str, str]:
    count = accelerator.count_of(device)
    if count is None:
        return {"type": device, "backend": accelerator.backend_for(device)}
    every = [torch.device(device, index) for index in range(count)]
    names = {str(each): f"{accelerator.name_of(each)}, {accelerator.memory_of(each) / GIB:.1f} GiB" for each in every}
    return {"type": device, "backend": accelerator.backend_for(device), **names}


def _processor(device: str, ranks: int, warnings: list[str]) -> dict[str, str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0]
    if device == "cpu" and ranks > usable:
        warnings.append(f"{ranks} ranks share {usable} cores, so that times mean nothing; pass --ranks {usable}")
    if load > usable:
        warnings.append(f"the load is {load:.1f} on {usable} cores: something else runs here, and times are too long")
    return {
        "cores": f"{os.cpu_count()}, of which this process may use {usable}",
        "threads a process": f"{torch.get_num_threads()}; ranks have OMP_NUM_THREADS, or 1",
        "load": f"{load:.1f}",
    }


def _memory(warnings: list[str]) -> dict[str, str]:
    facts = {"memory": f"{accelerator.memory_of(torch.device('cpu')) / GIB:.1f} GiB"}
    limit = Path("/sys/fs/cgroup/memory.max")
    if limit.exists() and (text := limit.read_text().strip()) != "max":
        facts["limit of the container"] = f"{int(text) / GIB:.1f} GiB"
    shared = Path("/dev/shm")
    if shared.is_dir():
        space = shutil.disk_usage(shared)
        facts["/dev/shm"] = f"{space.free / GIB:.2f} of {space.total / GIB:.2f} GiB free"
        if space.free < SHARED:
            warnings.append(
                f"/dev/shm has {space.free / GIB:.2f} GiB free, and loader workers pass batches through it; "
                "start the container with --shm-size=8g, or use no workers"
            )
    if not hasattr(os, "memfd_create"):
        warnings.append("this system has no memfd_create: ranks on CPUs communicate over TCP, which is slower")
    return facts


def _limits(device: str, warnings: list[str]) -> dict[str, str]:
    limits = {
        "open files": resource.RLIMIT_NOFILE,
        "processes": resource.RLIMIT_NPROC,
        "locked memory": resource.RLIMIT_MEMLOCK,
    }
    soft = {name: resource.getrlimit(which)[0] for name, which in limits.items()}
    unlimited = resource.RLIM_INFINITY
    if soft["open files"] != unlimited and soft["open files"] < FILES:
        warnings.append(f"{soft['open files']} open files are allowed; raise it: ulimit -n 65536")
    if device != "cpu" and soft["locked memory"] != unlimited:
        warnings.append("locked memory is limited, which InfiniBand and pinned memory run into: ulimit -l unlimited")
    return {name: "unlimited" if value == unlimited else str(value) for name, value in soft.items()}

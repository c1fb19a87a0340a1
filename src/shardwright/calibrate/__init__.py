"""Measures the machine: when `plan="auto"` first runs on it, and more thoroughly by `shardwright calibrate`.

Under torchrun the ranks that it started are measured, over all their nodes, on GPUs with NCCL or on CPUs with gloo.
`shardwright calibrate` without torchrun measures a machine of CPUs with gloo processes started here, and of a GPU only
what it can do alone.

Read `machine.py` (what `auto` does), `measuring.py`, `compute.py` and `collectives.py` (what is measured), `timing.py`
(how), and `tables.py` (the result).
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace

import torch.distributed as dist

from ..cluster import Cluster
from ..runtime.collectives import objects
from ..runtime.launch import run_processes
from ..runtime.world import World, start
from .collectives import count_per_node
from .machine import measured_cluster
from .measuring import measure
from .tables import tables
from .timing import BRIEF, FULL, QUICK, Effort

__all__ = ["BRIEF", "FULL", "QUICK", "Effort", "calibrate", "measured_cluster", "tables"]


def calibrate(effort: Effort, ranks: int | None = None, name: str = "measured") -> tuple[Cluster, World]:
    """The cluster that this process is on, measured, and who this process is in it.

    `ranks` is how many processes to start where torchrun has started none: one for each core by default.
    """
    ours = not dist.is_initialized()
    world = start()
    try:
        if world.size > 1 or world.device.type != "cpu":
            return replace(_rank(world.rank, effort), name=name), world
        count = ranks or min(os.cpu_count() or 1, 8)
        cluster = _rank(0, effort) if count == 1 else run_processes(count, _rank, effort)[0]
        return replace(cluster, name=name), world
    finally:
        if ours and dist.is_initialized():
            dist.destroy_process_group()


def _rank(rank: int, effort: Effort) -> Cluster:
    per_node = count_per_node(objects.all_gather_objects(socket.gethostname(), "names of nodes"))
    return measure(start(), per_node, effort)

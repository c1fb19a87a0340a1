"""Starts the processes of a race, one thread each, and brings back what rank 0 measured."""

import json
import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.progress import Progress

from . import hand_written, peers
from .race import Contender, Times, check_agreement, race
from .workload import Workload


@dataclass(frozen=True, kw_only=True)
class Heat:
    """One race: who, on what, how often. Plain data, so that it can be sent to a process."""

    work: Workload
    contenders: tuple[str, ...]
    rounds: int
    steps: int
    world: int = 2
    cpu_time: bool = False  # else wall time


def builder(name: str) -> Callable[[Workload], Contender]:
    """A peer by its name, or ours by a plan string such as "dp=2"."""
    known = {
        "eager": peers.eager,
        "ddp": peers.ddp,
        "fsdp2": peers.fsdp2,
        "dtensor": peers.dtensor_tp,
        "hand": hand_written.hand_written_tp,
    }
    if name in known:
        return known[name]
    from .attention import CONTIGUOUS, contiguous_ring
    from .ours import ours, silent_tp

    return {"silent": silent_tp, CONTIGUOUS: contiguous_ring}.get(name) or ours(name)


def run(heat: Heat) -> Times:
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(heat, folder), nprocs=heat.world)
        return json.loads((Path(folder) / "times.json").read_text())


def _rank(rank: int, heat: Heat, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), heat.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=heat.world)
    contenders = {name: builder(name)(heat.work) for name in heat.contenders}
    check_agreement(contenders, heat.work)
    clock = time.process_time if heat.cpu_time else time.perf_counter
    with Progress(disable=rank != 0, transient=True) as bar:
        task = bar.add_task(f"{heat.work.name}: {', '.join(heat.contenders)}", total=heat.rounds + 1)
        times = race(
            contenders, heat.work, rounds=heat.rounds, steps=heat.steps, clock=clock, progress=lambda: bar.advance(task)
        )
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    dist.destroy_process_group()

"""Starts the processes of a race, one thread each, and brings back what rank 0 measured."""

import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.progress import Progress

from . import hand_written, peers, tensor_parallel
from .memory import alive_after, allocated_by, peak_of_step
from .race import Contender, Times, check_agreement, run_laps
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
    memory: bool = False  # take the peak of a step of each contender, too


@dataclass(frozen=True, kw_only=True)
class Finish:
    """What a race has measured of a contender."""

    wall: list[float]  # seconds a step, one per round
    cpu: list[float]  # user and system time a step, on the average rank
    memory: int | None  # bytes that torch has allocated at the worst moment of a step, on the worst rank
    plan: str  # of ours
    predicted: float | None  # seconds a step, of ours


def builder(name: str) -> Callable[[Workload], Contender]:
    """A peer by its name, or ours by a plan string such as "dp=2"."""
    known = {
        "eager": peers.eager,
        "ddp": peers.ddp,
        "ddp-fused": partial(peers.ddp, fused=True),
        "fsdp2": peers.fsdp2,
        "dtensor": tensor_parallel.dtensor_tp,
        "dtensor-sp": tensor_parallel.dtensor_sp,
        "hand": hand_written.hand_written_tp,
    }
    if name in known:
        return known[name]
    from .attention import CONTIGUOUS, contiguous_ring
    from .ours import ours, silent_tp
    from .pipelines import MICROBATCHES, peer

    pipelining = partial(peer, "1f1b", microbatches=MICROBATCHES)
    special = {"silent": silent_tp, CONTIGUOUS: contiguous_ring, "pipelining": pipelining}
    return special.get(name) or ours(name)


def is_ours(name: str) -> bool:
    return "=" in name or name in ("auto", "single")


def run(heat: Heat) -> Times:
    return {name: finish.cpu if heat.cpu_time else finish.wall for name, finish in run_measured(heat).items()}


def run_measured(heat: Heat) -> dict[str, Finish]:
    os.environ["KINETO_LOG_LEVEL"] = "5"  # the profiler would tell when it starts
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(heat, folder), nprocs=heat.world)
        finishes = json.loads((Path(folder) / "finishes.json").read_text())
    return {name: Finish(**finish) for name, finish in finishes.items()}


def _rank(rank: int, heat: Heat, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), heat.world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=heat.world)
    os.chdir(folder)  # generated code goes there
    with Progress(disable=rank != 0, transient=True) as bar:
        title = f"{heat.work.name} on {heat.world}: {', '.join(heat.contenders)}"
        task = bar.add_task(title, total=heat.rounds + 2 + len(heat.contenders))
        contenders: dict[str, Contender] = {}
        memory: dict[str, int] = {}
        for name in heat.contenders:
            contenders[name], memory[name] = _build(name, heat)
            bar.advance(task)
        check_agreement(contenders, heat.work, taken=2 if heat.memory else 0)
        bar.advance(task)
        laps = run_laps(
            contenders, heat.work, rounds=heat.rounds, steps=heat.steps, progress=lambda: bar.advance(task)
        )  # fmt: skip
    everyone: list[Any] = [None] * heat.world
    dist.all_gather_object(everyone, ({name: [lap.cpu for lap in each] for name, each in laps.items()}, memory))
    if rank == 0:
        finishes = {
            name: Finish(
                wall=[lap.wall for lap in laps[name]],
                cpu=[mean(each) for each in zip(*(cpu[name] for cpu, _ in everyone), strict=True)],
                memory=max(bytes_of[name] for _, bytes_of in everyone) if heat.memory else None,
                plan=contender.plan, predicted=contender.predicted,
            )
            for name, contender in contenders.items()
        }  # fmt: skip
        (Path(folder) / "finishes.json").write_text(json.dumps({name: asdict(each) for name, each in finishes.items()}))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be at work for groups that nobody needs any more


def _build(name: str, heat: Heat) -> tuple[Contender, int]:
    """A contender, and the peak of its memory, if that is to be measured."""
    make = partial(builder(name), heat.work)
    if not heat.memory:
        return make(), 0
    contender, start = alive_after(make) if is_ours(name) else allocated_by(make)
    (batch,) = heat.work.batches(1)
    return contender, peak_of_step(start, lambda: contender.step(*batch))

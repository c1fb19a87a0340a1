"""A run in several lives: processes that train and are killed, and others that go on. For tests of kills."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from shardwright.train import Callback, Checkpoints, Logger

from .runs import parameters, trainer

PLACES = (
    "on_step_start", "on_batch_start", "before_sync", "after_sync", "before_optimizer_step", "after_optimizer_step",
    "on_step_end", "on_save_checkpoint",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Kill:
    """Which rank ends itself, and where; only once, if `marker` is the file that says so."""

    rank: int
    step: int
    place: str
    marker: Path | None = None


class Killed(Callback):
    """Ends this process without a word, at a place of a step."""

    def __init__(self, kill: Kill | None) -> None:
        self.kill = kill

    def act(self, place: str, trainer: Any) -> None:
        kill, step = self.kill, trainer.progress.step + (place not in ("on_step_end", "on_save_checkpoint"))
        if kill is not None and kill.place == place and step >= kill.step and trainer.world.rank == kill.rank:
            if kill.marker is not None:
                if kill.marker.exists():
                    return
                kill.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def _hook(place: str) -> Any:
    return lambda self, trainer, *what: self.act(place, trainer)


for _place in PLACES:
    setattr(Killed, _place, _hook(_place))


class Written(Logger):
    """A line a step, in a file that is there after any end."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps([step, metrics["loss"]]) + "\n")


def losses_in(path: Path) -> list[tuple[int, float]]:
    return [tuple(json.loads(line)) for line in path.read_text().splitlines()]


def live(folder: Path, plan: str, kill: Kill | None, steps: int, background: bool) -> Any:
    """Train from the last checkpoint to the end, or to the kill."""
    return trainer(
        folder, plan=plan, max_steps=steps, resume="last", loggers=[Written(folder / "losses")],
        callbacks=[Killed(kill)], checkpoints=Checkpoints(every=1, background=background),
    )  # fmt: skip


def _rank(rank: int, size: int, port: int, folder: Path, *how: Any) -> None:
    torch.set_num_threads(1)
    os.environ.update(GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(size))
    sys.stderr = (folder / f"rank{rank}.txt").open("w", buffering=1)
    if size > 1:
        wait = timedelta(seconds=60)
        store = dist.TCPStore("127.0.0.1", port, is_master=False, timeout=wait)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=wait)
    try:
        finish(live(folder, *how), folder)
    except Exception as error:
        sys.excepthook(type(error), error, error.__traceback__)  # as at the end of a script
        os._exit(1)


def finish(training: Any, folder: Path) -> None:
    training.fit()
    values = parameters(training)  # all ranks gather
    if training.world.rank == 0:
        torch.save(values, folder / "values.pt")


def run_life(
    size: int, folder: Path, *how: Any, limit: float = 120.0, during: Callable[[list[Any]], None] = lambda ranks: None
) -> list[int]:
    """Start ranks, wait for all to end, and say how: 0, 1 for an error, -9 for a kill. `during` is given them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.preload"])
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [context.Process(target=_rank, args=(rank, size, store.port, folder, *how)) for rank in range(size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + limit
    during(ranks)
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    ended = [process.exitcode for process in ranks]
    for process in ranks:
        if process.is_alive():
            process.kill()
        process.join()
    assert None not in ended, f"rank {ended.index(None)} did not end within {limit} s"
    return [int(code) for code in ended if code is not None]


if __name__ == "__main__":  # started by torchrun
    place, plan, victim = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    kill = Kill(rank=victim, step=4, place="after_sync", marker=place / "killed")
    finish(live(place, plan, kill, 6, False), place)

"""What comparing the inputs of ranks in every call costs: a step with it over a step without, on 2 gloo processes.

python -m bench.digest                      the GPT of d=256, dp=2 and tp=2, 60 pairs of steps
python -m bench.digest --pairs 200 --plan dp=2

The same compiled model takes steps with and without, in turns, so that a machine that drifts does so for both. Ratios
are the median over pairs of one step each. On a busy machine they scatter by more than there is to measure: so the time
that is spent in the comparison itself (the digests, posting, reading) is taken too, as a share of the step.
"""

import argparse
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from rich.console import Console
from rich.table import Table

import shardwright as sw
from shardwright.runtime.faults.input_comparison import InputComparison

from .peers import training_step
from .race import spread_of
from .workload import NARROW, optimizer_of

GOAL = 0.01  # of a step


@dataclass(frozen=True, kw_only=True)
class Measured:
    step_ms: float
    ratio: float  # of wall time, with over without
    spread: float
    cpu_ratio: float  # of the process's CPU time
    share: float  # of a step's wall time, in the comparison itself
    cpu_share: float  # of its CPU time


class Clocked:
    """An InputComparison whose time is taken."""

    def __init__(self, inner: InputComparison) -> None:
        self.inner, self.seconds, self.cpu = inner, 0.0, 0.0
        inner.begin, inner.settle = self._clocked(inner.begin), self._clocked(inner.settle)  # type: ignore[method-assign]
        self._depth = 0

    def _clocked(self, function):  # type: ignore[no-untyped-def]
        def run(*args, **kwargs):  # type: ignore[no-untyped-def]
            self._depth += 1
            start, busy = time.perf_counter(), time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._depth -= 1
                if not self._depth:  # begin calls settle
                    self.seconds += time.perf_counter() - start
                    self.cpu += time.process_time() - busy

        return run


def measure(plan: str, pairs: int) -> Measured:
    work = NARROW
    model = work.model()
    batches = work.batches(8)
    model, optimizer = sw.parallelize(model, optimizer_of(model), example=batches[0], plan=plan)
    step = training_step(model, optimizer, rows=False)
    comparison = model._comparison
    clocked = Clocked(comparison)
    times: dict[int, list[float]] = {0: [], 1: []}
    cpu: dict[int, list[float]] = {0: [], 1: []}
    shares: list[tuple[float, float]] = []
    for number in range(-8, pairs):  # the first warm up
        for every in (0, 1) if number % 2 else (1, 0):
            comparison.every, clocked.seconds, clocked.cpu = every, 0.0, 0.0
            dist.barrier()
            start, busy = time.perf_counter(), time.process_time()
            step(*batches[number % len(batches)])
            seconds, busy = time.perf_counter() - start, time.process_time() - busy
            if number >= 0:
                times[every].append(seconds)
                cpu[every].append(busy)
                if every:
                    shares.append((clocked.seconds / seconds, clocked.cpu / busy))
    ratios = [there / without for there, without in zip(times[1], times[0], strict=True)]
    return Measured(
        step_ms=1000 * median(times[0]), ratio=median(ratios), spread=spread_of(ratios),
        share=median(wall for wall, _ in shares), cpu_share=median(own for _, own in shares),
        cpu_ratio=median(there / without for there, without in zip(cpu[1], cpu[0], strict=True)),
    )  # fmt: skip


def _rank(rank: int, plans: list[str], pairs: int, folder: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
    by_key = {plan: measure(plan, pairs) for plan in plans}
    if rank == 0:
        torch.save({plan: asdict(value) for plan, value in by_key.items()}, Path(folder) / "found.pt")
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=60)
    parser.add_argument("--plan", action="append")
    options = parser.parse_args()
    plans = options.plan or ["dp=2", "tp=2"]
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(plans, options.pairs, folder), nprocs=2)
        actual = torch.load(Path(folder) / "found.pt")
    table = Table("plan", "step", "with / without", "spread", "CPU time", "comparison / step", "in CPU time",
                  f"goal: {GOAL:.0%}")  # fmt: skip
    for plan, value in actual.items():
        reached = "reached" if max(value["share"], value["cpu_share"]) < GOAL else "missed"
        table.add_row(plan, f"{value['step_ms']:.1f} ms", f"{value['ratio']:.4f}", f"{value['spread']:.4f}",
                      f"{value['cpu_ratio']:.4f}", f"{value['share']:.2%}",
                      f"{value['cpu_share']:.2%}", reached)  # fmt: skip
    Console().print(table)


if __name__ == "__main__":
    main()

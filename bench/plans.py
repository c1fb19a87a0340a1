"""Is the time model true here? Plans that are predicted after `shardwright calibrate`, beside what they take.

    python -m bench.plans [--rounds 5] [--quick]

For 2 and for 4 gloo processes this calibrates the machine, predicts the step of every model under every plan (and lets
the search choose one), then runs them, interleaved as in `race`. What counts is the order (Spearman's correlation),
the median error, and how far the plan that the search chose is from the fastest that was measured.

This kind of machine is at times a third slower than at others. So some fixed work (products and sums, without any of
our code) is timed right after calibration and again around every measurement, and predictions are scaled by the ratio.
"""

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from examples.gpt import GPT, GPTConfig
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

import shardwright as sw
from shardwright.calibrate import QUICK, Effort, calibrate
from shardwright.cluster import save

from .peers import Contender, training_step
from .race import race
from .workload import optimizer_of

SPEED = "speed"
"""Where a measurement says how long some fixed work took."""

EFFORT = Effort(each=0.1, longest=0.5, largest=2**26, factor=4, dtypes=(torch.float32,))
"""Calibration of what these models use."""

PLANS = {
    2: ("dp=2", "tp=2", "sp=2", "zero1=2", "zero2=2", "zero3=2"),
    4: ("dp=4", "tp=4", "dp=2,tp=2", "zero3=4", "zero2=2,tp=2"),
}


class Deep(nn.Module):
    """Linear layers, wide enough that their products dominate."""

    def __init__(self, width: int = 1024, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))
        self.head = nn.Linear(width, 64)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.layers(x)), y)


class Pictures(nn.Module):
    """A small net of convolutions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = (3, 32, 64, 128)
        convolutions = (nn.Conv2d(a, b, 3, padding=1) for a, b in pairwise(sizes))
        self.body = nn.Sequential(*(nn.Sequential(conv, nn.ReLU(), nn.MaxPool2d(2)) for conv in convolutions))
        self.head = nn.Linear(128 * 4 * 4, 10)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.body(x).flatten(1)), y)


def text(vocab: int, batch: int, seq: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        window = torch.randint(vocab, (batch, seq + 1), generator=generator)
        return window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return make


def rows(batch: int, *shape: int, classes: int) -> Callable[[torch.Generator], tuple[Tensor, Tensor]]:
    def make(generator: torch.Generator) -> tuple[Tensor, Tensor]:
        x = torch.rand((batch, *shape), generator=generator)
        return x, torch.randint(classes, (batch,), generator=generator)

    return make


@dataclass(frozen=True, kw_only=True)
class Job:
    """A model and its batches, in the shape that `race` asks for."""

    name: str
    make: Callable[[], nn.Module]
    batch: Callable[[torch.Generator], tuple[Tensor, Tensor]]

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make()

    def batches(self, count: int) -> list[tuple[Tensor, Tensor]]:
        generator = torch.Generator().manual_seed(1)
        return [self.batch(generator) for _ in range(count)]


JOBS = {
    job.name: job
    for job in (
        Job(name="mlp", make=Deep, batch=rows(256, 1024, classes=64)),
        Job(
            name="gpt",
            make=lambda: GPT(GPTConfig(vocab=512, seq=128, n_layer=4, n_head=8, d=256)),
            batch=text(512, 8, 128),
        ),
        Job(
            name="gpt, many words",
            make=lambda: GPT(GPTConfig(vocab=16384, seq=64, n_layer=2, n_head=4, d=128)),
            batch=text(16384, 8, 64),
        ),
        Job(name="pictures", make=Pictures, batch=rows(32, 3, 32, 32, classes=10)),
    )
}


@dataclass(frozen=True, kw_only=True)
class Run:
    """One plan of one model, predicted and measured, in seconds."""

    job: str
    ranks: int
    plan: str
    predicted: float
    measured: float
    spread: float

    @property
    def error(self) -> float:
        return abs(self.predicted / self.measured - 1)


def reference() -> float:
    """Seconds of some fixed work, to tell how fast the machine is at the moment."""
    side, line = torch.ones(512, 512), torch.ones(2**20)
    times = []
    for _ in range(15):
        begin = time.perf_counter()
        for _ in range(4):
            torch.mm(side, side)
            torch.add(line, line)
        times.append(time.perf_counter() - begin)
    return median(times)


def measure(job: str, ranks: int, plans: dict[str, str], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds a step of every plan (a plan string, or the path of a file), one number a round."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(job, ranks, plans, rounds, steps, folder), nprocs=ranks)
        return dict(json.loads((Path(folder) / "times.json").read_text()))


def _rank(rank: int, job: str, ranks: int, plans: dict[str, str], rounds: int, steps: int, folder: str) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    work: Any = JOBS[job]
    contenders = {}
    for name, plan in plans.items():
        model = work.model()
        model, optimizer = sw.parallelize(
            model,
            optimizer_of(model),
            example=work.batches(1)[0],
            plan=plan,
            compile={"directory": Path(folder) / "generated"},
        )
        contenders[name] = Contender(name=name, step=training_step(model, optimizer, rows=False))
    before = _slowest(reference())
    times = race(contenders, work, rounds=rounds, steps=steps) if plans else {}
    times[SPEED] = [before, _slowest(reference())]
    if rank == 0:
        (Path(folder) / "times.json").write_text(json.dumps(times))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # gloo's threads may still be at work for groups that nobody needs any more


def _slowest(seconds: float) -> float:
    values = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return float(values)


def runs(ranks: int, rounds: int, steps: int, quick: bool, names: Sequence[str], console: Console) -> list[Run]:
    cluster, _ = calibrate(QUICK if quick else EFFORT, ranks, f"{ranks} processes")
    console.print(
        f"{cluster.about}; {cluster.overlap:.2f} of a collective is hidden by products, "
        f"{1e3 * cluster.meeting:.2f} ms are lost when ranks meet"
    )
    then = median(measure(names[0], ranks, {}, 0, 0)[SPEED])
    collected = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "cluster.yaml"
        save(cluster, path)
        for name in names:
            job = JOBS[name]
            plans, predicted = {}, {}
            for request in (*PLANS[ranks], "auto"):
                plan = sw.plan(job.model(), example=job.batches(1)[0], plan=request, cluster=path)
                file = Path(folder) / f"{name}-{request}.json"
                plan.save(file)
                plans[request], predicted[request] = str(file), plan.predicted["train"]["seconds"]
            measured = measure(name, ranks, plans, rounds, steps)
            drift = median(measured.pop(SPEED)) / then
            console.print(f"  the machine takes {drift:.2f} of the time that it took when it was calibrated")
            for request, times in measured.items():
                predicted[request] *= drift
                low, _, high = quantiles(times, n=4)
                collected.append(
                    Run(job=name, ranks=ranks, plan=request, predicted=predicted[request], measured=median(times),
                        spread=(high - low) / median(times))
                )  # fmt: skip
                console.print(f"  {name} on {ranks}, {request}: predicted {1e3 * predicted[request]:.1f} ms, "
                              f"measured {1e3 * median(times):.1f} ms")  # fmt: skip
    return collected


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """The correlation of ranks."""

    def ranked(values: Sequence[float]) -> list[float]:
        order = sorted(range(len(values)), key=lambda at: values[at])
        actual = [0.0] * len(values)
        for place, at in enumerate(order):
            actual[at] = float(place)
        return actual

    x, y = torch.tensor([ranked(a), ranked(b)], dtype=torch.float64)
    return float(torch.corrcoef(torch.stack([x, y]))[0, 1])


def report(runs: Sequence[Run], console: Console) -> dict[str, Any]:
    table = Table("model", "ranks", "plan", "predicted ms", "measured ms", "error", "spread")
    for run in runs:
        table.add_row(
            run.job, str(run.ranks), run.plan, f"{1e3 * run.predicted:.1f}", f"{1e3 * run.measured:.1f}",
            f"{100 * (run.predicted / run.measured - 1):+.0f} %", f"{100 * run.spread:.0f} %",
        )  # fmt: skip
    console.print(table)
    correlation = spearman([run.predicted for run in runs], [run.measured for run in runs])
    error = median(run.error for run in runs)
    console.print(f"{len(runs)} runs: Spearman {correlation:.3f}, median error {100 * error:.0f} %")
    chosen = {}
    for run in runs:
        if run.plan == "auto":
            fastest = min((r for r in runs if (r.job, r.ranks) == (run.job, run.ranks)), key=lambda r: r.measured)
            ratio = run.measured / fastest.measured
            chosen[f"{run.job} on {run.ranks}"] = ratio
            console.print(
                f"{run.job} on {run.ranks}: the plan that the search chose takes {ratio:.3f} of the fastest "
                f"({fastest.plan}); spread {100 * max(run.spread, fastest.spread):.0f} %"
            )
    return {
        "spearman": correlation,
        "median error": error,
        "auto against the fastest": chosen,
        "runs": [vars(run) for run in runs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="calibrate quickly")
    parser.add_argument("--ranks", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), choices=list(JOBS))
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    console = Console(width=120)
    results = [
        run
        for ranks in options.ranks
        for run in runs(ranks, options.rounds, options.steps, options.quick, options.jobs, console)
    ]
    result = report(results, console)
    if options.output is not None:
        options.output.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Pipelines against torch.distributed.pipelining, on the same GPT cut in the same number of stages and microbatches.

python -m bench.pipelines                    2 ranks, 8 microbatches, 12 rounds
python -m bench.pipelines --rounds 4 --d 128

The peer is set up by hand as its documentation says: blocks shared out evenly, embeddings on the first stage, the
head on the last. Weights are not tied, since the peer does not sum the gradients of a weight that two stages hold.
"""

import argparse
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from examples.gpt import GPT
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleZBVZeroBubble,
)

import shardwright as sw

from .models import loss_of_logits
from .peers import Contender, training_step
from .race import Times, check_agreement, race, ratio_of
from .stages import STAGES
from .workload import GPTWorkload, Workload, optimizer_of

PAIRS = {"gpipe": ScheduleGPipe, "1f1b": Schedule1F1B, "interleaved": ScheduleInterleaved1F1B,
         "zb": ScheduleInterleavedZeroBubble, "zbv": ScheduleZBVZeroBubble}  # fmt: skip
MICROBATCHES = 4
"""Of a pipeline in the race of models."""
CHUNKS = {"interleaved": 2, "zbv": 2}


@dataclass(frozen=True, kw_only=True)
class Untied(GPTWorkload):
    """The GPT with a head of its own."""

    def model(self) -> GPT:
        output = super().model()
        output.head.weight = nn.Parameter(output.head.weight.detach().clone())
        return output


def peer(kind: str, work: Workload, microbatches: int) -> Contender:
    rank, world, chunks = dist.get_rank(), dist.get_world_size(), CHUNKS.get(kind, 1)
    model, count = work.model(), world * chunks
    each = len(work.layers(model)) // count
    mine = [rank, 2 * world - 1 - rank] if kind == "zbv" else [rank + world * at for at in range(chunks)]
    runs = [STAGES[work.kind](model, at * each, (at + 1) * each) for at in mine]
    stages = [PipelineStage(run, at, count, torch.device("cpu")) for run, at in zip(runs, mine, strict=True)]
    single = kind in ("gpipe", "1f1b")
    schedule = PAIRS[kind](stages[0] if single else stages, microbatches, loss_fn=loss_of_logits)
    optimizer = optimizer_of(nn.ModuleList(runs))
    last = 0 if kind == "zbv" else world - 1

    def step(x: Tensor, y: Tensor) -> Tensor:
        losses: list[Tensor] = []
        inputs = {"target": y, "losses": losses} if rank == last else {}
        schedule.step(*([x] if 0 in mine else []), **inputs)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(losses).mean().detach() if rank == last else torch.zeros(())
        dist.broadcast(loss, last)
        return loss

    return Contender(name=f"torch {kind}", step=step)


def ours(kind: str, work: Workload, microbatches: int) -> Contender:
    model = work.model()
    model, optimizer = sw.parallelize(
        model, optimizer_of(model), example=work.batches(1)[0], plan=f"pp={dist.get_world_size()},{kind}",
        pipeline={"microbatches": microbatches},
    )  # fmt: skip
    return Contender(name=f"ours {kind}", step=training_step(model, optimizer, rows=False))


def _rank(rank: int, options: argparse.Namespace, work: Workload, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(Path(folder) / "store"), options.ranks), rank=rank, world_size=options.ranks
    )
    makers: tuple[Callable[[str, Workload, int], Contender], ...] = (ours, peer)
    values = [make(kind, work, options.microbatches) for kind in options.kinds.split(",") for make in makers]
    contenders = {contender.name: contender for contender in values}
    check_agreement(contenders, work)
    with Progress(disable=rank != 0, transient=True) as bar:
        task = bar.add_task(work.name, total=options.rounds + 1)
        times = race(contenders, work, rounds=options.rounds, steps=2, progress=lambda: bar.advance(task))
    if rank == 0:
        Console().print(table_of(times, options, work))
    dist.barrier()
    dist.destroy_process_group()


def table_of(times: Times, options: argparse.Namespace, work: Workload) -> Table:
    title = f"{work.name}, {options.ranks} ranks, {options.microbatches} microbatches"
    table = Table("schedule", "ours", "torch", "torch / ours", "spread", title=title)
    for kind in options.kinds.split(","):
        a, b = f"ours {kind}", f"torch {kind}"
        ratio = ratio_of(times, b, a)
        table.add_row(
            kind, *(f"{1e3 * min(times[name]):.0f} ms" for name in (a, b)), f"{ratio.value:.3f}", f"{ratio.spread:.2f}"
        )
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--d", type=int, default=256)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--kinds", default="1f1b,zb")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    work = Untied(name=f"GPT {options.layers} layers, d={options.d}", d=options.d, n_layer=options.layers, batch=16)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(options, work, folder), nprocs=options.ranks)


if __name__ == "__main__":
    main()

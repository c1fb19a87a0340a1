"""Attention on real models and long sequences: `python -m bench.attention` prints three tables.

    overhead   CPU time of the compiled model on one rank over eager's: Llama, GPT-2, BERT, T5, ViT
    sequence   algorithms of context parallelism against each other, on 2 ranks
    memory     the peak of a rank while sequence and ranks grow together

python -m bench.attention --only sequence --rounds 5
"""

import argparse
from dataclasses import replace
from functools import partial

from rich.console import Console
from rich.table import Table

import shardwright as sw
from shardwright.rules import without_stripes
from shardwright.runtime.launch import run_processes

from .memory import Case, measure_case
from .models import MODELS
from .peers import Contender, training_step
from .race import Ratio, ratio_of, ratio_of_minima
from .ranks import Heat, run
from .workload import GPTWorkload, Workload, optimizer_of

CONTIGUOUS = "cp=2, contiguous"
"""A ring of contiguous shards, in which the last rank has the most to do."""
RACED = ("cp=2", CONTIGUOUS, "cp_all_gather=2", "ulysses=2", "tp=2")
LONG = GPTWorkload(name="GPT 2 layers, d=128, 4,096 tokens", d=128, n_layer=2, n_head=4, seq=4096, batch=1, vocab=256)


def overhead(rounds: int) -> Table:
    table = Table("model", "CPU time / eager's", "spread", title="one rank")
    for name in ("llama-256", "gpt2", "bert", "t5", "vit"):
        heat = Heat(work=MODELS[name], contenders=("single", "eager"), rounds=rounds, steps=1, world=1, cpu_time=True)
        _row(table, name, ratio_of_minima(run(heat), "single", "eager"))
    return table


def contiguous_ring(work: Workload) -> Contender:
    model, example = work.model(), work.batches(1)[0]
    plan = sw.plan(model, example=example, plan="cp=2", cluster=2)
    (stage,) = plan.entries["train"]
    choices = {
        op: {axis: without_stripes(role) for axis, role in choice.items()} for op, choice in stage.choices.items()
    }
    plan = replace(plan, entries={"train": (replace(stage, choices=choices),)})
    model, optimizer = sw.parallelize(model, optimizer_of(model), example=example, plan=plan)
    return Contender(name=CONTIGUOUS, step=training_step(model, optimizer, rows=False))


def sequence(rounds: int) -> Table:
    times = run(Heat(work=LONG, contenders=RACED, rounds=rounds, steps=1))
    table = Table("plan", "time / that of cp=2", "spread", title=f"2 ranks, {LONG.name}")
    for name in RACED:
        _row(table, name, ratio_of(times, name, "cp=2"))
    return table


def _long_gpt(length: int) -> Case:
    work = replace(LONG, seq=length)
    return work.model().train(), work.batches(1)[0], {}


def _measured(rank: int, length: int, plan: str) -> tuple[float, float]:
    """The peak, and how much of it comes with a step; the table of positions grows with the sequence too."""
    measured = measure_case(partial(_long_gpt, length), plan)
    return measured.peak / 2**20, (measured.peak - measured.before) / 2**20


def memory(_: int) -> Table:
    title = f"sequence and ranks grow together: GPT 2 layers, d={LONG.d}"
    table = Table("plan", "tokens", "peak of a rank, MiB", "of a step", title=title)
    for plan, ranks in (("single", 1), ("cp=2", 2), ("cp=4", 4)):
        length = 1024 * ranks
        peak, step = run_processes(ranks, _measured, length, plan, timeout=600.0)[0]
        table.add_row(plan, f"{length:,}", f"{peak:.1f}", f"{step:.1f}")
    return table


def _row(table: Table, name: str, ratio: Ratio) -> None:
    table.add_row(name, f"{ratio.value:.3f}", f"{ratio.spread:.2g}")


def main() -> None:
    parts = {"overhead": overhead, "sequence": sequence, "memory": memory}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    for name in [options.only] if options.only else parts:
        Console().print(parts[name](options.rounds))


if __name__ == "__main__":
    main()

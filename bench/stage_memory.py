"""The memory of the ranks of a pipeline, predicted and measured: `python -m bench.stage_memory` prints one table.

As in `bench.memory`, measured is what torch has allocated at the worst moment of the second training step, here on
every rank.
"""

import argparse
import platform
import tempfile

import torch
from rich.console import Console
from rich.table import Table

import shardwright as sw
from shardwright.plan import Plan
from shardwright.runtime.launch import run_processes

from .memory import GOAL, MODELS, Measured, measure_case, mib

Case = tuple[str, int, int, int, str]
CASES: tuple[Case, ...] = (  # model, ranks, stages, microbatches, schedule
    ("mlp", 2, 2, 4, "1f1b"),
    ("mlp", 2, 2, 4, "zb"),
    ("gpt", 2, 2, 4, "1f1b"),
    ("gpt", 2, 2, 4, "zbv"),
    ("gpt", 2, 2, 4, "interleaved"),
    ("gpt", 4, 4, 8, "1f1b"),
    ("gpt", 4, 2, 4, "1f1b"),
    ("llama", 2, 2, 4, "zb"),
)


def plan_of(case: Case) -> Plan:
    """The plan that the search finds for a case."""
    name, ranks, stages, microbatches, schedule = case
    module, args, kwargs = MODELS[name]()
    options = [{"stages": stages}, {"microbatches": microbatches}, {"schedule": schedule}]
    return sw.plan(module, example=(args, kwargs), cluster=ranks, constraints=options)


def measure_here(rank: int, name: str, path: str) -> Measured:
    """Two steps on this rank, of which the second is measured."""
    return measure_case(MODELS[name], path)


def rows(case: Case) -> list[tuple[str, ...]]:
    name, ranks, *_ = case
    plan = plan_of(case)
    message = plan.predicted["train"]["pipeline"]["stages"]
    by_rank = {}
    for planned, stage in zip(plan.stages, message, strict=True):
        by_rank |= dict.fromkeys(planned.mesh.devices, stage["memory"])
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        plan.save(file.name)
        results: list[Measured] = run_processes(ranks, measure_here, name, file.name, timeout=300.0)
    table = []
    for rank, truth in enumerate(results):
        off = by_rank[rank] / truth.peak - 1
        colour = "green" if abs(off) <= 1.5 * GOAL else "red"
        phases = " ".join(mib(size) for size in (truth.forward, truth.backward, truth.update))
        whole = "" if truth.complete else "releases were missed"
        words = (*map(str, case), str(rank))
        table.append((*words, mib(by_rank[rank]), mib(truth.peak), f"[{colour}]{off:+.1%}", phases, whole))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", type=int, default=list(range(len(CASES))))
    args = parser.parse_args()
    table = Table(
        "model", "ranks", "stages", "microbatches", "schedule", "rank", "predicted", "measured", "off",
        "call, backward, update", "",
        title="The most memory a rank of a pipeline has in a step, MiB",
        caption=f"AdamW, gloo, {platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}",
    )  # fmt: skip
    for number in args.cases:
        for row in rows(CASES[number]):
            table.add_row(*row)
    Console(width=160).print(table)


if __name__ == "__main__":
    main()

"""Measure everything that is claimed: `make bench` prints one table and writes bench/results.json.

python -m bench.run                          all of it
python -m bench.run --only races --rounds 5  a part, quickly; writes no results
python -m bench.run --race ddp,eager         any contenders against the first; writes no results (--d 512: wider)
python -m bench.run --models all             real models on 2 and 4 ranks: bench/race.json, docs/benchmarks.md
python -m bench.run --models llama-256,resnet --ranks 2 --rounds 4        a part of it; prints, writes no results
"""

import argparse
import json
import platform
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table

from .compile_llama import in_own_process
from .entries import OVERHEAD, PAIRS, Entry, compile_entries, unmeasured_compile
from .model_race import PEERS, Standing, machine, results_of, run_model, write_page
from .models import MODELS
from .race import Times, ratio_of, ratio_of_minima
from .ranks import Heat, run
from .workload import NARROW, WIDE, WIDEST, Workload

RESULTS = Path(__file__).parent / "results.json"
RACE = Path(__file__).parent / "race.json"
STEPS = {NARROW: 3, WIDE: 2, WIDEST: 2}  # in a row, so that a cell of the race lasts about a second
WIDTHS = {work.d: work for work in STEPS}
SINGLE = "single"  # the plan string of a program for one rank


def races(rounds: int) -> list[Entry]:
    entries = []
    for work in STEPS:
        names = tuple(name for pair in PAIRS for name in (pair.ours, pair.peer))
        claims = {pair: pair.claim(work.name) for pair in PAIRS}
        try:
            times = run(Heat(work=work, contenders=names, rounds=rounds, steps=STEPS[work]))
        except Exception as error:
            entries += [Entry(claim=claim, measured=None, why_not=last_line(error)) for claim in claims.values()]
            continue
        entries += [Entry(claim=c, measured=ratio_of(times, pair.peer, pair.ours)) for pair, c in claims.items()]
    return entries


def overhead(rounds: int) -> list[Entry]:
    # Eager against itself is off by 1 % in 12 rounds of 2 steps: more rounds, shorter ones.
    heat = Heat(work=NARROW, contenders=(SINGLE, "eager"), rounds=3 * rounds, steps=1, world=1, cpu_time=True)
    try:
        times = run(heat)
    except Exception as error:
        return [Entry(claim=OVERHEAD, measured=None, why_not=last_line(error))]
    return [Entry(claim=OVERHEAD, measured=ratio_of_minima(times, SINGLE, "eager"))]


def compiling(_: int) -> list[Entry]:
    try:
        return compile_entries(*(in_own_process(ranks) for ranks in (8, 512, 4096)))
    except RuntimeError as error:
        return unmeasured_compile(last_line(error))


def last_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[-1]


def table_of(entries: list[Entry]) -> Table:
    machine = f"{platform.machine()}, Python {platform.python_version()}, torch {torch.__version__}, 1 thread a rank"
    table = Table(
        "measured", "result", "spread", "goal", "holds", title="shardwright against its goals", caption=machine
    )
    for entry in entries:
        claim, unit = entry.claim, f" {entry.claim.unit}" if entry.claim.unit else ""
        sign = "≥" if claim.better == "more" else "≤"
        holds = "[green]yes" if entry.holds else "[red]no"
        result = f"{entry.measured.value:.4g}{unit}" if entry.measured else f"[red]not measured: {entry.why_not}"
        spread = f"{entry.measured.spread:.2g}" if entry.measured else ""
        table.add_row(claim.name, result, spread, f"{sign} {claim.goal:g}{unit}", holds)
    return table


def free_race(names: tuple[str, ...], work: Workload, rounds: int) -> Table:
    times: Times = run(Heat(work=work, contenders=names, rounds=rounds, steps=STEPS[work]))
    table = Table(
        "contender", "median step", f"time / {names[0]} time", "spread", title=f"{work.name}, {rounds} rounds"
    )
    for name in names:
        ratio = ratio_of(times, name, names[0])
        table.add_row(name, f"{1e3 * median(times[name]):.0f} ms", f"{ratio.value:.3f}", f"{ratio.spread:.2g}")
    return table


def model_race(args: argparse.Namespace, console: Console) -> None:
    names = list(MODELS) if args.models == "all" else args.models.split(",")
    ranks, rounds, before = [int(size) for size in args.ranks.split(",")], args.rounds or 8, machine()
    some = tuple(args.contenders.split(";")) if args.contenders else ()
    standings, failed = [], {}
    for name in names:
        for size in ranks:
            try:
                standings.append(run_model(MODELS[name], size, rounds, args.steps, some))
            except Exception as error:  # the others have still to race
                failed[f"{name} on {size} ranks"] = str(error).strip()
                console.print(f"[red]{name} on {size} ranks failed: {last_line(error)}")
                continue
            console.print(table_of_race(standings[-1]))
    results = {**results_of(standings, before, rounds), "failed": failed}
    if args.models == "all" and not some:
        RACE.write_text(json.dumps(results, indent=1) + "\n")
        write_page(results)
        console.print(f"written to {RACE.relative_to(Path.cwd())} and docs/benchmarks.md")
    if failed:
        raise SystemExit(f"{len(failed)} of {len(failed) + len(standings)} races failed")


def table_of_race(standing: Standing) -> Table:
    title = f"{standing.model} on {standing.ranks} ranks"
    below = "auto" if "auto" in standing.finishes else [*standing.finishes][-1]
    table = Table("contender", "step", f"over {below}", "spread", "CPU a rank", "memory", "plan", title=title)
    for name, finish in standing.finishes.items():
        ratio = standing.ratio(name, below)
        table.add_row(
            PEERS.get(name, name), f"{1e3 * standing.time(name):.0f} ms", f"{ratio.value:.3f}", f"{ratio.spread:.2g}",
            f"{1e3 * median(finish.cpu):.0f} ms", f"{(finish.memory or 0) / 2**20:.1f} MiB", finish.plan,
        )  # fmt: skip
    return table


def main() -> None:
    parts = {"races": races, "overhead": overhead, "compile": compiling}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="24; in the race of models 8")
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--race", help="contenders, separated by spaces or commas: eager ddp fsdp2 dtensor hand silent")
    parser.add_argument("--d", type=int, choices=WIDTHS, default=NARROW.d, help="with --race: the width of the model")
    parser.add_argument("--models", help=f"all, or some of {', '.join(MODELS)}")
    parser.add_argument("--ranks", default="2,4", help="with --models")
    parser.add_argument("--contenders", help='with --models: only some of them, such as "ddp;fsdp2;auto;zero3=2"')
    parser.add_argument("--steps", type=int, default=2, help="with --models: in a row, in each turn")
    args = parser.parse_args()
    console = Console()
    if args.models:
        model_race(args, console)
        return
    args.rounds = args.rounds or 24
    if args.race:
        names = tuple(args.race.replace(",", " ").split())
        console.print(free_race(names, WIDTHS[args.d], args.rounds))
        return
    chosen = [args.only] if args.only else list(parts)
    entries = [entry for name in chosen for entry in parts[name](args.rounds)]
    console.print(table_of(entries))
    if not args.only:
        RESULTS.write_text(json.dumps([entry.record() for entry in entries], indent=2) + "\n")
        console.print(f"written to {RESULTS.relative_to(Path.cwd())}")


if __name__ == "__main__":
    main()

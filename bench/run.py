"""Measure everything that is claimed: `make bench` prints one table and writes bench/results.json.

python -m bench.run                          all of it
python -m bench.run --only races --rounds 5  a part, quickly; writes no results
python -m bench.run --race ddp,eager         any contenders against the first; writes no results (--d 512: wider)
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
from .race import Times, ratio_of, ratio_of_minima
from .ranks import Heat, run
from .workload import LLAMAS, NARROW, WIDE, WIDEST, Workload

RESULTS = Path(__file__).parent / "results.json"
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


def llama(rounds: int) -> list[Entry]:
    """Attention at length: what eager runs as causal is causal in ours."""
    entries = []
    for work in LLAMAS:
        pair = PAIRS[0]
        try:
            times = run(Heat(work=work, contenders=(pair.ours, pair.peer), rounds=rounds, steps=1))
        except Exception as error:
            entries.append(Entry(claim=pair.claim(work.name), measured=None, why_not=last_line(error)))
            continue
        entries.append(Entry(claim=pair.claim(work.name), measured=ratio_of(times, pair.peer, pair.ours)))
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


def main() -> None:
    parts = {"races": races, "llama": llama, "overhead": overhead, "compile": compiling}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--only", choices=parts)
    parser.add_argument("--race", help="contenders, separated by spaces or commas: eager ddp fsdp2 dtensor hand silent")
    parser.add_argument("--d", type=int, choices=WIDTHS, default=NARROW.d, help="with --race: the width of the model")
    args = parser.parse_args()
    console = Console()
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

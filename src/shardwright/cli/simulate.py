"""`shardwright simulate`: a pipeline schedule as a picture, with its time, bubble and memory."""

from __future__ import annotations

from argparse import Namespace

from rich.console import Console

from ..errors import InputError
from ..schedule import StageEdge, StageTimes, check, draw_run, in_flight, schedule_kind, simulate


def run_simulate(options: Namespace, console: Console) -> int:
    for name in ("stages", "microbatches"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)} must be at least 1")
    kind = schedule_kind(options.schedule)
    schedule = kind.make(options.stages, options.microbatches)
    share = 1.0 / kind.stages_per_rank  # a pipeline rank splits its work over its virtual stages
    times = StageTimes(
        forward=options.forward * share, backward=options.backward * share, weight=options.weight * share
    )
    edges = [StageEdge(at, at + 1, options.link, options.link) for at in range(schedule.stages - 1)]
    check(schedule, edges)
    run = simulate(schedule, [times] * schedule.stages, edges)
    console.print(draw_run(run, options.width or console.width), highlight=False, markup=False, soft_wrap=True)
    kept = max(in_flight(schedule)) * share
    console.print(
        f"{run.total:g} in all; bubble {100 * run.bubble:.1f} %; at most {kept:g} microbatches in flight on a device",
        highlight=False,
    )
    return 0

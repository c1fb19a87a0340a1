"""`shardwright simulate`: a schedule as a picture, and how long it takes."""

from __future__ import annotations

from jsonargparse import ArgumentParser, Namespace
from rich.console import Console

from ..errors import InputError
from ..schedule import USUAL, StageEdge, StageTimes, check, draw_run, in_flight, schedule_kind, schedule_names, simulate


def simulate_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description="Draw a schedule of a pipeline, with the share of time in which devices wait, and what they keep."
    )
    parser.add_argument("--schedule", default=USUAL.name, help=schedule_names())
    parser.add_argument("--stages", type=int, default=4, help="how many")
    parser.add_argument("--microbatches", type=int, default=8, help="how many")
    parser.add_argument("--forward", type=float, default=1.0, help="time of a stage's forward, for one microbatch")
    parser.add_argument("--backward", type=float, default=1.0, help="of its backward, without the weights' gradients")
    parser.add_argument("--weight", type=float, default=1.0, help="of the weights' gradients")
    parser.add_argument("--link", type=float, default=0.0, help="of sending a value from one stage to the next")
    parser.add_argument("--width", type=int, default=120, help="of the picture, in characters")
    return parser


def run_simulate(options: Namespace, console: Console) -> int:
    for name in ("stages", "microbatches"):
        if getattr(options, name) < 1:
            raise InputError(f"--{name} {getattr(options, name)} is none; at least 1")
    kind = schedule_kind(options.schedule)
    schedule = kind.make(options.stages, options.microbatches)
    share = 1.0 / kind.stages_per_rank  # virtual stages share the work of a rank
    times = StageTimes(
        forward=options.forward * share, backward=options.backward * share, weight=options.weight * share
    )
    edges = [StageEdge(at, at + 1, options.link, options.link) for at in range(schedule.segments - 1)]
    check(schedule, edges)
    run = simulate(schedule, [times] * schedule.segments, edges)
    console.print(draw_run(run, options.width), highlight=False, markup=False, soft_wrap=True)
    kept = max(in_flight(schedule)) * share
    console.print(
        f"{run.total:g} in all; devices wait {100 * run.bubble:.1f} % of the time; at most {kept:g} microbatches are "
        "kept on a device",
        highlight=False,
    )
    return 0

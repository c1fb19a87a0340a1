"""The screen of a pipeline, from the plan file: its schedule drawn, its stages, the runners-up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from ..plan import Plan
from ..schedule import Schedule, SimulatedRun, StageEdge, StageTimes, draw_run, fewer, schedule_kind, simulate
from .communication import format_bytes
from .text import format_time, indented, parts_of_step, parts_of_time, percent, step_time, table_of

MOST_LINES = 8  # of the picture
MOST_STAGES = 8
MOST_OTHERS = 4
WIDTH = 78

Predicted = Mapping[str, Any]


def pipeline_screen(plan: Plan, entry: str) -> Iterator[RenderableType]:
    """The parts of the screen about time and stages. One stage with microbatches is gradient accumulation."""
    predicted = plan.predicted[entry]
    staged = len(predicted["pipeline"]["stages"]) > 1
    yield from _time(predicted, staged)
    if staged:
        yield Text(picture(plan, entry))
        yield _stages(predicted["pipeline"]["stages"])
    else:
        yield from _accumulation(plan, predicted["pipeline"]["stages"][0])
    if "tried" in predicted["pipeline"]:
        yield from _others(predicted, staged)


def pipeline_devices(predicted: Predicted) -> list[str]:
    """The devices of each pipeline rank."""
    return list(dict.fromkeys(stage["devices"] for stage in predicted["pipeline"]["stages"]))


def _time(predicted: Predicted, staged: bool) -> Iterator[RenderableType]:
    step, pipeline = predicted["seconds"], predicted["pipeline"]
    yield step_time(predicted)
    yield from parts_of_time(parts_of_step(predicted), step, bool(predicted.get("stopped")))
    if staged:
        slowest = f"the slowest stage takes {percent(pipeline['balance'] - 1)} longer than the mean"
        yield indented(f"bubble {percent(pipeline['bubble'])} of the schedule; {slowest}")


def _accumulation(plan: Plan, stage: Predicted) -> Iterator[RenderableType]:
    each = f"forward {format_time(stage['forward'])}, backward {format_time(stage['backward'])}"
    yield indented(f"gradient accumulation over {plan.microbatches} microbatches: each {each}")


def picture(plan: Plan, entry: str, width: int = WIDTH) -> str:
    """The schedule as it is predicted to run, the first and last lines of a large one."""
    some = min(plan.microbatches, 3 * len(pipeline_devices(plan.predicted[entry])) + 2)
    head, *lines = draw_run(simulated(plan, entry, some), width).splitlines()
    if len(lines) > MOST_LINES:
        half = MOST_LINES // 2
        lines = [*lines[:half], f"   .. {len(lines) - 2 * half} more pipeline ranks", *lines[-half:]]
    shown = "" if some == plan.microbatches else f" (drawn with {some} of {plan.microbatches} microbatches)"
    return "\n".join([head.partition(", bubble")[0] + shown, *lines])


def simulated(plan: Plan, entry: str, microbatches: int) -> SimulatedRun:
    """The schedule with so many microbatches, run with the predicted times of its stages."""
    stages = plan.predicted[entry]["pipeline"]["stages"]
    if plan.steps is not None:
        schedule = Schedule.from_json(plan.steps)
        schedule = fewer(schedule, microbatches) if microbatches < schedule.microbatches else schedule
    else:
        schedule = schedule_kind(plan.schedule).make(len(pipeline_devices(plan.predicted[entry])), microbatches)
    apart = schedule.splits_weights
    times = [
        StageTimes(stage["forward"], stage["backward"] - stage["weight"] * apart, stage["weight"] * apart)
        for stage in stages
    ]
    return simulate(schedule, times, stage_edges(plan, entry))


def stage_edges(plan: Plan, entry: str) -> list[StageEdge]:
    """What is sent between neighbouring stages, with its predicted seconds."""
    stages = plan.predicted[entry]["pipeline"]["stages"]
    return [StageEdge(at, at + 1, stage["enters"], stage["enters"]) for at, stage in enumerate(stages[1:])]


def _stages(stages: Sequence[Predicted]) -> Table:
    table = table_of("stage", "devices", "mesh", "modules", ">recomputed", ">forward", ">backward", ">memory")
    rows = [(number, stage) for number, stage in enumerate(stages)]
    cut = len(rows) > MOST_STAGES
    shown = [*rows[: MOST_STAGES // 2], *rows[-(MOST_STAGES // 2) :]] if cut else rows
    for at, (number, stage) in enumerate(shown):
        if cut and at == MOST_STAGES // 2:
            table.add_row(f"  .. {len(rows) - MOST_STAGES} more")
        again = str(stage["recompute"]) if stage["recompute"] else "-"
        numbers = (again, format_time(stage["forward"]), format_time(stage["backward"]), format_bytes(stage["memory"]))
        table.add_row(f"  {number}", stage["devices"], stage["mesh"], Text(describe_layers(stage["layers"])), *numbers)
    return table


def describe_layers(paths: Sequence[str], most: int = 3) -> str:
    """Modules as text: "embed, blocks.0-3, norm"."""
    names: list[str] = []
    for key, group in groupby(paths, key=lambda path: path.rpartition(".")[0] if path[-1:].isdigit() else path):
        run = list(group)
        ends = f"{run[0].rpartition('.')[2]}-{run[-1].rpartition('.')[2]}"
        names.append(f"{key}.{ends}" if len(run) > 1 else run[0])
    named = [path for path in names if not path.startswith("/")] or names
    return ", ".join(named[:most]) + (f", {len(named) - most} more" if len(named) > most else "")


def _others(predicted: Predicted, staged: bool) -> Iterator[RenderableType]:
    pipeline, best = predicted["pipeline"], predicted["seconds"]
    flat, without = pipeline["flat"], "without a pipeline" if staged else "without microbatches"
    if flat is None:
        yield indented(f"{without} nothing was searched, or nothing fits")
    else:
        yield indented(f"{without} ({flat['mesh']}) a step takes {percent(flat['seconds'] / best - 1)} longer")
    words = [
        f"{other['text']}: {percent(other['seconds'] / best - 1)} slower" for other in pipeline["others"][:MOST_OTHERS]
    ]
    if words:
        yield indented("runners-up: " + "; ".join(words))
    yield indented(
        f"{pipeline['tried']} plans with stages or microbatches were tried, {pipeline['pruned']} pruned by their bounds"
    )

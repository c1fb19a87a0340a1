"""The timeline of a step: what each pipeline rank runs, and what is in one forward, one backward and the update.

A plan without a pipeline has one lane, which all ranks share. With stages the schedule is simulated, as `sw.explain`
draws it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...plan import Plan
from ...schedule import Schedule, SimulatedRun, Step, show_devices
from ..pipeline import pipeline_devices, simulated
from .interning import Interned
from .phases import TimelinePhase

MOST_STEPS = 24_000  # that are drawn, of all pipeline ranks
STEP_KINDS = {"P": "prologue", "F": "forward", "B": "backward", "W": "weight gradients"}


def drawn_run(plan: Plan, entry: str) -> SimulatedRun:
    """The schedule with as many of its microbatches as can be drawn."""
    ranks = len(pipeline_devices(plan.predicted[entry]))
    stages = len(plan.predicted[entry]["pipeline"]["stages"])
    some = max(1, MOST_STEPS // (3 * max(stages, ranks)))
    return simulated(plan, entry, min(plan.microbatches, some))


def pipeline_timeline(plan: Plan, entry: str, run: SimulatedRun) -> dict[str, Any]:
    """Lanes of steps, from the plan file alone. Times are in microseconds."""
    predicted, schedule = plan.predicted[entry], run.schedule
    devices, stages = pipeline_devices(predicted), predicted["pipeline"]["stages"]
    lanes = []
    for group in schedule.groups():
        own = schedule.held_by(group[0])
        once = sum(stages[number].get("once", 0.0) for number in own)
        lanes.append({
            "name": f"pipeline rank {show_devices(group)}", "stages": list(own),
            "devices": devices[group[0]] if len(group) == 1 and group[0] < len(devices) else "",
            **_columns(schedule.devices[group[0]], run.starts[group[0]], run.ends[group[0]]),
            "update": [round(1e6 * run.total, 2), round(1e6 * once, 2)],
        })  # fmt: skip
    return {
        "total": round(1e6 * (run.total + predicted["update"]), 2), "lanes": lanes,
        "drawn": schedule.microbatches, "microbatches": plan.microbatches,
        "accumulate": predicted["for"]["accumulate"], "name": _title(schedule),
        "splitsWeights": schedule.splits_weights,
        "enters": [round(1e6 * stage["enters"], 2) for stage in stages],
    }  # fmt: skip


def _title(schedule: Schedule) -> str:
    return schedule.name if schedule.stages > 1 else "gradient accumulation"


def _columns(steps: Sequence[Step], starts: Sequence[float], ends: Sequence[float]) -> dict[str, Any]:
    return {
        "kinds": "".join(step.kind for step in steps), "stage": [step.stage for step in steps],
        "microbatch": [step.microbatch for step in steps], "starts": [round(1e6 * start, 2) for start in starts],
        "ends": [round(1e6 * end, 2) for end in ends],
    }  # fmt: skip


def flat_timeline(phases: Mapping[str, TimelinePhase], accumulate: int) -> dict[str, Any]:
    """One lane for all ranks: forward and backward, as often as gradients are accumulated, then the update."""
    steps, starts, ends = [], [], []
    now = 0.0
    for microbatch in range(accumulate):
        for kind, when in (("F", "forward"), ("B", "backward")):
            if phases[when].seconds > 0:
                steps.append(Step("F" if kind == "F" else "B", 0, microbatch))
                starts.append(now)
                now += phases[when].seconds
                ends.append(now)
    update = phases["update"].seconds
    lane = {
        "name": "every rank", "stages": [0], "devices": "", **_columns(steps, starts, ends),
        "update": [round(1e6 * now, 2), round(1e6 * update, 2)],
    }  # fmt: skip
    return {
        "total": round(1e6 * (now + update), 2), "lanes": [lane], "drawn": accumulate, "microbatches": accumulate,
        "accumulate": 1, "name": "", "splitsWeights": False, "enters": [0.0],
    }  # fmt: skip


def with_details(
    timeline: dict[str, Any], phases: Sequence[Mapping[str, TimelinePhase]], names: Interned
) -> dict[str, Any]:
    """The timeline with what is inside of a step of each stage."""
    details = [{when: phase.as_json(names) for when, phase in stage.items()} for stage in phases]
    return {**timeline, "details": details}

"""The predicted step as a trace for ui.perfetto.dev and chrome://tracing, with the lanes of the report's timeline.

Events are those of the timeline's data: a process for each pipeline rank, in it the steps of the schedule, what runs
inside of them, and overlapped collectives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from ...errors import InputError
from .phases import OVERLAPPED
from .timeline import STEP_KINDS

STEPS, OPS, BESIDE = range(3)  # threads of a process
THREADS = {STEPS: "steps (predicted)", OPS: "ops and blocking collectives", BESIDE: "overlapped collectives"}
MOST_EVENTS = 300_000
DETAILED = {"F": "forward", "B": "backward", "U": "update"}
COLOURS = ("thread_state_running", "bad", "yellow", "yellow", "good")  # by the kind of a block, of Chrome's palette


def chrome_trace(contents: Mapping[str, Any]) -> dict[str, Any]:
    """The trace of a plan's contents. Times are in microseconds.

    Of a very long schedule only the first microbatch has its ops.
    """
    timeline = contents.get("timeline")
    if timeline is None:
        raise InputError("the trace of a plan without a pipeline needs its model: --model FILE.py:FUNCTION, or a graph")
    details = timeline.get("details", [])
    every = sum(len(phase["names"]) for stage in details for phase in stage.values()) * timeline["drawn"]
    some = 1 if every > MOST_EVENTS else timeline["drawn"]
    events: list[dict[str, Any]] = []
    for number, lane in enumerate(timeline["lanes"]):
        where = f" (devices {lane['devices']})" if lane["devices"] else ""
        events.append(_meta("process_name", number, 0, f"{lane['name']}{where}, predicted"))
        events += [_meta("thread_name", number, thread, name) for thread, name in THREADS.items()]
        events += _events(contents, number, lane, some)
    return {
        "traceEvents": events, "displayTimeUnit": "ms",
        "otherData": {"predicted by": "shardwright", "plan": contents["name"], "microbatches": timeline["drawn"]},
    }  # fmt: skip


def _meta(kind: str, process: int, thread: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _events(contents: Mapping[str, Any], process: int, lane: Mapping[str, Any], some: int) -> Iterator[dict[str, Any]]:
    timeline = contents["timeline"]
    update = (*lane["update"][:1], sum(lane["update"]))
    steps = [*zip(lane["kinds"], lane["stage"], lane["microbatch"], lane["starts"], lane["ends"], strict=True)]
    if lane["update"][1]:
        steps.append(("U", lane["stages"][0], 0, *update))
    for kind, stage, microbatch, start, end in steps:
        text = "sync and update" if kind == "U" else f"{STEP_KINDS[kind]} of stage {stage}, microbatch {microbatch}"
        yield {"ph": "X", "name": text, "pid": process, "tid": STEPS, "ts": start, "dur": round(end - start, 2)}
        halved = timeline["splitsWeights"] and kind == "B"  # backward is in two steps, its ops are not told apart
        if "details" in timeline and kind in DETAILED and microbatch < some and not halved:
            phase = timeline["details"][stage][DETAILED[kind]]
            yield from _inside(contents["names"], process, phase, start, end)


def _inside(
    names: list[str], process: int, phase: Mapping[str, Any], start: float, end: float
) -> Iterator[dict[str, Any]]:
    scale = (end - start) / (1e6 * phase["seconds"]) if phase["seconds"] else 1.0
    columns = (phase[column] for column in ("names", "kinds", "starts", "lengths", "ops"))
    for name, kind, at, length, op in zip(*columns, strict=True):
        yield {
            "ph": "X", "name": names[name], "pid": process, "tid": BESIDE if kind == OVERLAPPED else OPS,
            "ts": round(start + scale * at, 2), "dur": round(scale * length, 2), "cname": COLOURS[kind],
            "args": {"op": names[op]},
        }  # fmt: skip

"""Schedules as data: what each device runs in which order, checked, simulated for its time, and drawn.

Read `step.py` (the types), `known.py` (gpipe, 1f1b, ...) and `kind.py` (a schedule by name, and what it knows about
itself), `dependencies.py` (what waits for what), `check.py`, `simulate.py` and `memory.py` (on that graph), `draw.py`,
`greedy.py` (a schedule for given times), `reorder.py` (a schedule with some steps in another order).
"""

from .check import check
from .dependencies import StageEdge
from .draw import draw, draw_run
from .greedy import greedy
from .kind import KINDS, ScheduleKind, register_schedule, schedule_kind, schedule_names, searched_kinds
from .known import (
    USUAL,
    eager,
    fewer,
    forward_only,
    gpipe,
    interleaved,
    one_f_one_b,
    spread,
    with_prologue,
    zbv,
    zero_bubble,
)
from .memory import MicrobatchMemory, in_flight, saved_after
from .reorder import reordered
from .simulate import UNIT, SimulatedRun, StageTimes, lower_bound, simulate
from .step import STEP_KINDS, Schedule, Step, StepKind, show_devices

__all__ = [
    "KINDS",
    "STEP_KINDS",
    "UNIT",
    "USUAL",
    "MicrobatchMemory",
    "Schedule",
    "ScheduleKind",
    "SimulatedRun",
    "StageEdge",
    "StageTimes",
    "Step",
    "StepKind",
    "check",
    "draw",
    "draw_run",
    "eager",
    "fewer",
    "forward_only",
    "gpipe",
    "greedy",
    "in_flight",
    "interleaved",
    "lower_bound",
    "one_f_one_b",
    "register_schedule",
    "reordered",
    "saved_after",
    "schedule_kind",
    "schedule_names",
    "searched_kinds",
    "show_devices",
    "simulate",
    "spread",
    "with_prologue",
    "zbv",
    "zero_bubble",
]  # fmt: skip

"""Schedules as data: what each device runs in which order, checked, simulated for its time, and drawn."""

from .check import check
from .draw import draw, draw_run
from .greedy import greedy
from .kinds import (
    KINDS,
    Kind,
    eager,
    fewer,
    forward_only,
    gpipe,
    interleaved,
    kind_named,
    one_f_one_b,
    spread,
    with_prologue,
    zbv,
    zero_bubble,
)
from .memory import Kept, in_flight
from .simulate import UNIT, Run, Times, lower_bound, simulate
from .step import STEP_KINDS, Schedule, Step, StepKind
from .wiring import Edge

__all__ = [
    "KINDS", "STEP_KINDS", "UNIT", "Edge", "Kept", "Kind", "Run", "Schedule", "Step", "StepKind", "Times", "check",
    "draw", "draw_run", "eager", "fewer", "forward_only", "gpipe", "greedy", "in_flight", "interleaved", "kind_named",
    "lower_bound", "one_f_one_b", "simulate", "spread", "with_prologue", "zbv", "zero_bubble",
]  # fmt: skip

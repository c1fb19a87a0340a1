"""Schedules as data: what each device runs in which order, checked, simulated for its time, and drawn."""

from .kinds import (
    KINDS,
    Kind,
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
from .step import STEP_KINDS, Schedule, Step, StepKind

__all__ = [
    "KINDS", "STEP_KINDS", "Kind", "Schedule", "Step", "StepKind", "forward_only", "gpipe", "interleaved", "kind_named",
    "one_f_one_b", "spread", "with_prologue", "zbv", "zero_bubble",
]  # fmt: skip

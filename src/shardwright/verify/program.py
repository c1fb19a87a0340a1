"""A model as a program and its text, without a world: capture, plan, lower, emit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..capture import Captured, capture
from ..compile import skeleton_of
from ..emit import emit
from ..lower import Program, lower
from ..plan import Plan
from ..planning import PlanLike, make_plan
from ..probe import probing
from ..rules import analyse


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """What the flow makes of a call, stage by stage."""

    captured: Captured
    plan: Plan
    program: Program

    @property
    def text(self) -> str:
        """The generated file."""
        return emit(self.program).text


def compile_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    plan: PlanLike,
    size: int,
    *,
    promote: bool = False,
) -> Compilation:
    """The program of one call for `size` ranks. Nothing runs, and parameters may be on meta."""
    entry = "train" if module.training else "eval"
    real = (module, args, kwargs)
    captured = capture(skeleton_of(module), args, kwargs, entry=entry, promote=promote, real=lambda: real)
    facts = analyse(captured.graph, probing(captured.functions))
    found = make_plan(captured.graph, facts, plan, size)
    return Compilation(captured=captured, plan=found, program=lower(captured.graph, found, facts))

"""A model as a program and its text, without a world: capture, plan, lower, emit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..capture import CapturedGraph, MaskFacts, capture
from ..compile import copy_to_meta
from ..emit import emit
from ..lower import LoweredProgram
from ..plan import Plan
from ..plan.lowering import lower, lower_pipeline
from ..plan.request import PlanRequest
from ..planning import make_plan
from ..probe import probing
from ..rules import analyse


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The result of each step of compilation."""

    captured: CapturedGraph
    plan: Plan
    programs: tuple[LoweredProgram, ...]  # one for each stage

    @property
    def program(self) -> LoweredProgram:
        """The program of a plan without a pipeline."""
        (program,) = self.programs
        return program

    @property
    def texts(self) -> tuple[str, ...]:
        """The generated files."""
        return tuple(emit(program).text for program in self.programs)

    @property
    def text(self) -> str:
        """The generated file of a plan without a pipeline."""
        return emit(self.program).text


def compile_program(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    request: PlanRequest,
    size: int,
    *,
    promote: bool = False,
    captured: CapturedGraph | None = None,
) -> Compilation:
    """The program of one call for `size` ranks. Nothing runs, and parameters may be on meta.

    captured   the captured call, if there is one already
    """
    if captured is None:
        real, entry = (module, args, kwargs), "train" if module.training else "eval"
        captured = capture(copy_to_meta(module), args, kwargs, entry=entry, promote=promote, real=lambda: real,
                           masks=MaskFacts(buffers=dict(module.named_buffers(remove_duplicate=False))))  # fmt: skip
    analysis = analyse(captured.graph, probing(captured.functions))
    chosen = make_plan(captured.graph, analysis, request, size)
    if chosen.is_pipeline:
        programs = lower_pipeline(captured.graph, chosen, analysis).programs
    else:
        programs = (lower(captured.graph, chosen, analysis),)
    return Compilation(captured=captured, plan=chosen, programs=programs)

"""`sw.verify` with threads, for several plans of one model: the original is captured and run once.

reference = referred(model, example)
assert verified(reference, "dp=2")
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from shardwright.plan.request import PlanRequest
from shardwright.verify.measure import TOLERANCE, Report
from shardwright.verify.parity import (
    ComparisonOptions,
    Reference,
    compare_plan,
    make_reference,
    make_task,
    ranks_of,
)


def referred(model: nn.Module, example: Any, dtype: torch.dtype = torch.float64, **options: Any) -> Reference:
    """The original, run; `options` are those of `sw.verify` that concern it."""
    return make_reference(make_task(model, example, dtype, torch.device("cpu"), **options))


def verified(reference: Reference, plan: str, **options: Any) -> Report:
    """The program of a plan, held against the original."""
    limit = TOLERANCE[reference.side.task.dtype]
    request = PlanRequest.read(plan)
    run = ComparisonOptions(limit=limit, **options)
    return compare_plan(reference, request, ranks_of(request.source), run, name=plan)

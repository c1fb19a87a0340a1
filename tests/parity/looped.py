"""A loop on one device and the same loop on ranks that are threads, for whatever a loop may do.

    both("gpt", "dp=2", loop)

calls `loop(model, optimizer, case)` with the original and, on every rank, with what
`parallelize` returns; the loop says what it saw, and both must have seen the same.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardwright.parallelize import parallelize
from shardwright.runtime.model.parallel_model import ParallelModel
from tests.models.zoo import ZOO, Case
from tests.options import grouped
from tests.runtime.ranks import run_ranks

from .single import whole_gradients
from .threaded import world_of

Loop = Callable[[Any, torch.optim.Optimizer, Case], list[Tensor]]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def both(
    name: str, plan: str, loop: Loop, optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    example: bool = False, tolerance: float = 1e-10, dtype: torch.dtype = torch.float64, **options: Any,
) -> None:  # fmt: skip
    """Run a loop on one device and under a plan, and compare all it says."""
    case = ZOO[name](dtype=dtype)
    wanted = loop(case.module, optimizer([p for p in case.module.parameters() if p.requires_grad]), case)
    assert wanted
    scale = max(float(expected.abs().max()) for expected in wanted if expected.numel())
    for result in on_ranks(name, plan, loop, optimizer, example, dtype, **options):
        assert len(result) == len(wanted)
        for number, (mine, other) in enumerate(zip(result, wanted, strict=True)):
            assert mine.shape == other.shape, number
            apart = float((mine.double() - other.double()).abs().max()) if other.numel() else 0.0
            assert apart <= tolerance * scale, f"item {number} of {len(wanted)} is {apart:.2e} off"


def on_ranks(
    name: str, plan: str, loop: Loop, optimizer: Callable[..., torch.optim.Optimizer] = sgd,
    example: bool = False, dtype: torch.dtype = torch.float64, **options: Any,
) -> list[Any]:  # fmt: skip
    """What a loop says on every rank."""
    folder = tempfile.mkdtemp(prefix="parity-")
    # threads share torch's generator, so that the models are made before
    cases = [ZOO[name](dtype=dtype) for _ in range(world_of(plan))]

    def run(rank: int) -> Any:
        case = cases[rank]
        instance = optimizer([p for p in case.module.parameters() if p.requires_grad])
        inputs = {"example": (case.args, case.kwargs)} if example else {}
        model, same = parallelize(case.module, instance, plan=plan, **grouped(directory=folder, **inputs, **options))
        assert same is instance
        return loop(model, instance, case)

    return run_ranks(world_of(plan), run, timeout=200)


def gradients(model: Any) -> list[Tensor]:
    """All gradients of an original or a compiled model, whole, in the order of names."""
    if isinstance(model, ParallelModel):
        stored = whole_gradients(model)
    else:
        stored = {key: p.grad for key, p in model.named_parameters()}
    return [torch.zeros(0) if stored[key] is None else stored[key].clone() for key in sorted(stored)]  # type: ignore[union-attr]


def parameters(model: Any) -> list[Tensor]:
    """All parameters, whole, in the order of names."""
    stored = model.full_state_dict() if isinstance(model, ParallelModel) else model.state_dict()
    return [stored[key].clone() for key in sorted(stored)]

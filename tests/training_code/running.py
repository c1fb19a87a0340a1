"""Runs a script as it is, and again with `sw.parallelize` on ranks that are threads; both must return the same."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shardwright.parallelize import parallelize
from shardwright.verify.parity import ranks_of
from tests.runtime.ranks import run_ranks

TOLERANCE = 1e-10
_SEEDED = threading.Lock()  # ranks that are threads share torch's one generator


class OneLine(Protocol):
    """The line that a script adds: `model, optimizer = one_line(model, optimizer)`."""

    def __call__(self, model: nn.Module, optimizer: Any = None, **options: Any) -> Any: ...


Script = Callable[[OneLine], Sequence[Tensor]]


def seeded(make: Callable[[], Any]) -> Any:
    """What a function makes with a fixed seed."""
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return make()


def parameters(model: Any) -> list[Tensor]:
    """All parameters and buffers, whole, in the order of their names."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return [state[key].detach().clone() for key in sorted(state)]


def check(script: Script, plan: str) -> None:
    """Assert that a script returns the same with and without its one line, on every rank."""

    def as_it_is(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
        return model if optimizer is None else (model, optimizer)

    folder = Path(tempfile.mkdtemp(prefix="training-code-"))

    def parallel(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
        return parallelize(model, optimizer, plan=plan, directory=folder, **options)

    expected = script(as_it_is)
    size = 2 if plan == "auto" else ranks_of(plan)
    for rank, tensors in enumerate(run_ranks(size, lambda rank: script(parallel), timeout=300)):
        assert len(tensors) == len(expected)
        scale = max(float(tensor.abs().max()) for tensor in expected if tensor.numel())
        for number, (mine, theirs) in enumerate(zip(tensors, expected, strict=True)):
            apart = float((mine.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
            assert apart <= TOLERANCE * scale, f"rank {rank}: tensor {number} is off by {apart:.3g}"

"""Runs a script as it is, and again with `sw.parallelize` on ranks that are threads; both must return the same."""

from __future__ import annotations

import io
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from torch import Tensor, nn

from shardwright.errors import ShardwrightError
from shardwright.parallelize import parallelize
from shardwright.plan.request import read_source
from tests.options import grouped
from tests.runtime.ranks import run_ranks

TOLERANCE = 1e-10
PLANS = ["dp=2", "tp=2", "zero3=2", "pp=2", "auto"]
FLAT = ["dp=2", "tp=2", "zero3=2", "auto"]  # for scripts that a pipeline refuses
DOUBLE = torch.float64
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


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)


def parameters(model: Any) -> list[Tensor]:
    """All parameters and buffers, whole, in the order of their names."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return [state[key].detach().clone() for key in sorted(state)]


def written(value: Any) -> Any:
    """What a script finds in a file that it has saved."""
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def whole(model: Any) -> dict[str, Tensor]:
    """The state dict that a script saves, whatever the plan: all ranks gather it."""
    actual: dict[str, Tensor] = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return actual


def as_it_is(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
    """A line that does nothing."""
    return model if optimizer is None else (model, optimizer)


def check(script: Script, plan: str, reference: OneLine = as_it_is, **message: Any) -> None:
    """Assert that a script returns the same with and without its one line, on every rank."""
    expected = script(reference)
    for rank, tensors in enumerate(_parallel(script, plan, message)):
        assert len(tensors) == len(expected)
        for number, (mine, theirs) in enumerate(zip(tensors, expected, strict=True)):
            assert mine.shape == theirs.shape, f"rank {rank}: tensor {number} is {mine.shape}, not {theirs.shape}"
            size = max(1.0, float(theirs.abs().max())) if theirs.numel() else 1.0
            apart = float((mine.double() - theirs.double()).abs().max()) if theirs.numel() else 0.0
            assert apart <= TOLERANCE * size, f"rank {rank}: tensor {number} is off by {apart:.3g}"


def check_refused(script: Script, plan: str, kind: type[ShardwrightError], *words: str, **message: Any) -> None:
    """Assert that a script does not run under a plan, and that the error says why and what to do."""
    with pytest.raises(kind) as caught:
        _parallel(script, plan, message)
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _parallel(script: Script, plan: str, message: dict[str, Any]) -> list[Sequence[Tensor]]:
    folder = Path(tempfile.mkdtemp(prefix="training-code-"))

    def parallel(model: nn.Module, optimizer: Any = None, **options: Any) -> Any:
        return parallelize(model, optimizer, plan=plan, **grouped(directory=folder, **(options | message)))

    return run_ranks(2 if plan == "auto" else read_source(plan).size, lambda rank: script(parallel), timeout=300)

"""Checks of plans, each on ranks of its own: parity with one device, and the time of a step.

A check that fails or hangs ends with its ranks, and the next one starts on new ones.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor, nn

from ..errors import PlanError
from ..parallelize import parallelize
from ..runtime import accelerator
from ..runtime.launch import launch
from ..runtime.world import here, start
from ..verify import verify
from .models import VOCABULARY, Decoder, ExpertDecoder

ALL = ("dp", "tp", "sp", "zero1", "zero2", "zero3", "pp", "cp", "ep", "auto")
QUICK = ("dp", "tp", "zero3", "pp")
TIMEOUT = 300.0  # seconds for the ranks of one check
STEPS = 8  # that are timed, after two that are not


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanCheck:
    """What was found about a plan. `error`: why there is nothing else; `skipped`: it can't be checked here."""

    plan: str
    passed: bool = False
    skipped: bool = False
    deviation: float | None = None  # the worst, relative to what parity allows
    step: float | None = None  # seconds
    speed: float | None = None  # how many times as fast as one device
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sizes:
    samples: int
    length: int
    width: int
    layers: int


SMALL = _Sizes(samples=8, length=16, width=32, layers=2)
LARGE = _Sizes(samples=16, length=64, width=128, layers=2)


def check_plans(kinds: Sequence[str], device: str, ranks: int, timed: bool) -> Iterator[PlanCheck]:
    """One plan of each kind, one after the other; with `timed` also how long a step takes."""
    alone = launch(_time_alone, ranks=1, device=device, timeout=TIMEOUT) if timed else None
    for kind in kinds:
        plan = kind if kind == "auto" else f"{kind}={ranks}"
        try:
            deviation, step = launch(_check, plan, timed, ranks=ranks, device=device, timeout=TIMEOUT)
        except PlanError as error:
            # the search needs a device of the catalogue, or a calibration; a named plan has no such excuse
            yield PlanCheck(plan=plan, skipped=kind == "auto", error=str(error))
        except Exception as error:  # whatever is wrong with the machine is what the user wants to read
            yield PlanCheck(plan=plan, error=f"{type(error).__name__}: {error}")
        else:
            speed = alone / step if alone is not None and step is not None else None
            yield PlanCheck(plan=plan, passed=deviation <= 1.0, deviation=deviation, step=step, speed=speed)


# -- on the ranks ----------------------------------------------------------------------------------


def _check(plan: str, timed: bool) -> tuple[float, float | None]:
    """The worst deviation relative to what is allowed, and the seconds of a step."""
    start()
    model, batch = _model(plan, SMALL)
    dtype = accelerator.widest_float(here().device)
    report = verify(model, plan, example=batch, method="world", optimizer="adamw", dtype=dtype)
    return report.worst.ratio, _time_step(plan) if timed else None


def _time_step(plan: str) -> float:
    model, batch = _model(plan, LARGE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    compiled, optimizer = parallelize(model, optimizer, plan=plan, example=batch)
    return _seconds(compiled, optimizer, batch)


def _time_alone() -> float:
    """Seconds of a step of the decoder without shardwright, on one device."""
    start()
    model, batch = _model("", LARGE)
    return _seconds(model, torch.optim.AdamW(model.parameters(), lr=1e-3), batch)


def _seconds(model: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    times = []
    for _ in range(2 + STEPS):
        began = time.perf_counter()
        model(*batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        accelerator.synchronize(here().device)
        times.append(time.perf_counter() - began)
    return median(times[2:])


def _model(plan: str, sizes: _Sizes) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The same on every rank."""
    torch.manual_seed(0)
    device = here().device
    model = ExpertDecoder(sizes.width) if plan.startswith("ep") else Decoder(sizes.width, sizes.layers)
    ids = torch.randint(VOCABULARY, (sizes.samples, sizes.length + 1))
    return model.to(device), (ids[:, :-1].contiguous().to(device), ids[:, 1:].contiguous().to(device))

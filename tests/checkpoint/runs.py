"""A run that is saved, and runs that go on from it: what every test of checkpoints does.

The optimizer has two groups with settings of their own and a schedule, so that a group that loses
a member, or a schedule that starts anew, shows in the next step.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shardwright as sw
from shardwright.runtime.model.parallel_model import ParallelModel
from tests.models.zoo import ZOO

CompiledRun = tuple[nn.Module, torch.optim.Optimizer, Any]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=0.01, amsgrad=True),
    "momentum": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    # without eps a gradient that is zero but for rounding (of a key's bias) would be blown up to a step
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=0.05, eps=(1e-6, 1e-3)),
}


def make_run(name: str, kind: str, plan: str | None, folder: str | Path, seed: int = 0) -> CompiledRun:
    """A model, its optimizer and its schedule; under a plan, or as they are without one."""
    case = ZOO[name](seed=seed, dtype=torch.float64)
    flat = [p for p in case.module.parameters() if p.dim() < 2]
    rest = [p for p in case.module.parameters() if p.dim() >= 2]
    optimizer = OPTIMIZERS[kind]([{"params": rest}, {"params": flat, "weight_decay": 0.0, "lr": 0.02}])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    model = case.module
    if plan is not None:
        model, optimizer = sw.parallelize(
            model,
            optimizer,
            plan=plan,
            example=(case.args, case.kwargs),
            compile={"directory": Path(folder) / "generated"},
        )
    return model, optimizer, schedule


def steps(run: CompiledRun, name: str, count: int) -> list[float]:
    """The losses of some steps. Each step has a batch of its own."""
    model, optimizer, schedule = run
    losses = []
    for _ in range(count):
        args = ZOO[name](seed=schedule.last_epoch, dtype=torch.float64).args
        loss = model(*args)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.item())
    return losses


def forget(run: CompiledRun) -> None:
    """As after a crash: nothing of a run is left but what it is made of."""
    model, optimizer, schedule = run
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    optimizer.state.clear()
    for group in optimizer.param_groups:
        group["lr"] = float("nan")
    schedule.last_epoch = 1000


def values(model: nn.Module) -> dict[str, Tensor]:
    """All that a state dict has, whole."""
    stored = model.full_state_dict() if isinstance(model, ParallelModel) else model.state_dict()
    return {key: value.detach().clone() for key, value in stored.items()}


def assert_same(actual: dict[str, Tensor], wanted: dict[str, Tensor], tolerance: float = 1e-9) -> None:
    assert actual.keys() == wanted.keys()
    for key, value in wanted.items():
        torch.testing.assert_close(
            actual[key], value, rtol=tolerance, atol=tolerance, msg=lambda text, key=key: f"{key}: {text}"
        )

"""The optimizers that torch tests itself with, with all their samples of settings, under a compiled model.

A small network of float64 is trained for three steps on one device as it is, compiled for one device, and on two
ranks under tensor parallelism and ZeRO-2; the parameters must be the same.
"""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.testing._internal import common_optimizers

from shardwright.errors import ShardwrightError
from shardwright.parallelize import parallelize
from tests.ops.judge import Verdict, apart, described
from tests.runtime.ranks import run_ranks

PLANS = {"single": 1, "tp=2": 2, "zero2=2": 2}
STEPS = 3


class Net(nn.Module):
    """Two matrices, which every optimizer takes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8, bias=False), nn.Linear(8, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.down(torch.tanh(self.up(x))) - x).square().mean()


@cache
def optimizers() -> dict[str, Any]:
    return {info.name: info for info in common_optimizers.optim_db}


def judge_optimizer(name: str) -> Iterator[tuple[str, int, Verdict]]:
    """(settings and plan, ranks, verdict) for each of torch's samples of settings."""
    info = optimizers()[name]
    for value in info.optim_inputs_func(device="cpu"):
        for plan, size in PLANS.items():
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield f"{name}({value.kwargs}) {plan}", size, _judge(info, dict(value.kwargs), plan, size)


def _judge(info: Any, settings: dict[str, Any], plan: str, size: int) -> Verdict:
    torch.manual_seed(0)
    net, x = Net().double(), torch.randn(4, 6, dtype=torch.float64)

    def make(module: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = info.optim_cls(module.parameters(), **copy.deepcopy(settings))
        return optimizer

    original = copy.deepcopy(net)
    try:
        _train(original, make(original), x)
    except RuntimeError as error:  # SparseAdam takes sparse gradients only
        return Verdict("skipped", described(error))
    wanted = {key: parameter.detach() for key, parameter in original.named_parameters()}

    def rank(_: int) -> dict[str, Tensor]:
        mine = copy.deepcopy(net)
        with tempfile.TemporaryDirectory(prefix="shardwright-optim-") as folder:
            model, optimizer = parallelize(mine, make(mine), plan=plan, example=(x,), compile={"directory": folder})
            _train(model, optimizer, x)
            state: dict[str, Tensor] = model.full_state_dict()
            return state

    try:
        actual = run_ranks(size, rank) if size > 1 else [rank(0)]
    except ShardwrightError as error:
        return Verdict("refused", f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever it is, a user would see it
        return Verdict("foreign", described(error))
    for value in actual:
        for key, tensor in wanted.items():
            if off := apart(value[key], tensor):
                return Verdict("wrong", f"{key} {off}")
    return Verdict("right")


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        loss: Tensor = model(x)
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    step: Callable[..., Any] = optimizer.step
    for _ in range(STEPS):
        step(closure)

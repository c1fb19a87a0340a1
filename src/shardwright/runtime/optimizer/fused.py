"""Adam's fused update on CPUs, where nobody has said how an optimizer goes over its parameters.

torch then goes op by op there, a dozen passes over memory, where one kernel does the same arithmetic in one. That
kernel goes by memory and does not look at strides, so it is only used where a parameter, its gradient and its state
lie in memory alike; otherwise it would add up what does not belong together, without a word.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.optim import Adam, Optimizer

from ..parameters.sharded import Untouched


@contextmanager
def fused(optimizer: Optimizer) -> Iterator[None]:
    """Within this, groups that may be updated by the fused kernel are; afterwards they are as they were."""
    plain = inspect.unwrap(type(optimizer).step) is inspect.unwrap(Adam.step)  # torch wraps the step of every class
    with Untouched():
        groups = [group for group in optimizer.param_groups if plain and _may_be(group, optimizer)]
    try:
        for group in groups:
            group["fused"] = True
        yield
    finally:
        for group in groups:
            group["fused"] = None


def _may_be(group: dict[str, Any], optimizer: Optimizer) -> bool:
    chosen = group.get("fused") is not None or group.get("foreach") is not None
    if chosen or group["differentiable"] or isinstance(group["lr"], Tensor):
        return False
    return all(_alike(leaf, optimizer.state.get(leaf, {})) for leaf in group["params"] if leaf.grad is not None)


def _alike(leaf: Tensor, state: dict[str, Any]) -> bool:
    step = state.get("step")
    tensors = (leaf, leaf.grad, *(value for name, value in state.items() if name != "step"))
    return (
        leaf.device.type == "cpu"
        and leaf.is_floating_point()
        and all(
            isinstance(tensor, Tensor) and tensor.dtype == leaf.dtype and tensor.is_contiguous() for tensor in tensors
        )
        and (step is None or (isinstance(step, Tensor) and step.dtype == torch.float32))
    )

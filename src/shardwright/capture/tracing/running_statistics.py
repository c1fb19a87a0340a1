"""Running statistics that PyTorch's layers update in ways that a graph can't say, written with plain ops.

An instance norm writes to its statistics inside of one op that does not say so. A batch norm with `momentum=None`
averages over all batches so far, by a factor that is a number taken out of a buffer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from ..user_calls.kept import KeptCalls, current


@contextmanager
def traceable_statistics(user_calls: KeptCalls) -> Iterator[None]:
    """For the length of a trace, these statistics are updated by ops that can be seen."""
    instance_norm, forward = F.instance_norm, _BatchNorm.forward

    def instance_norm_seen(
        input: Tensor, running_mean: Tensor | None = None, running_var: Tensor | None = None,
        weight: Tensor | None = None, bias: Tensor | None = None, use_input_stats: bool = True, momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:  # fmt: skip
        seen = current() is user_calls and use_input_stats and running_mean is not None and running_var is not None
        if seen and running_mean is not None and running_var is not None:
            dims = tuple(range(2, input.dim()))
            with torch.no_grad():
                _average(running_mean, input.mean(dims).mean(0), momentum)
                _average(running_var, input.var(dims).mean(0), momentum)
            running_mean = running_var = None
        return instance_norm(input, running_mean, running_var, weight, bias, use_input_stats, momentum, eps)

    def batch_norm_seen(self: _BatchNorm, input: Tensor) -> Tensor:
        if current() is user_calls and self.training and self.momentum is None and self.track_running_stats:
            return _batch_norm_over_all(self, input)
        return forward(self, input)

    functions: Any = F
    layers: Any = _BatchNorm
    try:
        functions.instance_norm, layers.forward = instance_norm_seen, batch_norm_seen
        yield
    finally:
        functions.instance_norm, layers.forward = instance_norm, forward


def _batch_norm_over_all(norm: nn.Module, input: Tensor) -> Tensor:
    """A batch norm with the average over all batches: with a momentum of 1 it gives the statistics of this one."""
    layer: Any = norm
    layer._check_input_dim(input)
    mean, var = torch.zeros_like(layer.running_mean), torch.zeros_like(layer.running_var)
    normalized = F.batch_norm(input, mean, var, layer.weight, layer.bias, True, 1.0, layer.eps)
    with torch.no_grad():
        layer.num_batches_tracked.add_(1)
        factor = 1.0 / layer.num_batches_tracked.to(layer.running_mean.dtype)
        _average(layer.running_mean, mean, factor)
        _average(layer.running_var, var, factor)
    return normalized


def _average(running: Tensor, batch: Tensor, factor: float | Tensor) -> None:
    running.mul_(1 - factor).add_(batch.to(running.dtype) * factor)

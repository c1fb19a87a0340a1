"""How gradients of data-parallel replicas are combined if each computes its own loss outside of the model.

With inputs="per_replica" a replica's loss is about its own samples. The gradient of the step is

    mean     the mean of the replicas' gradients, as in DDP
    sum      their sum
    token    the mean over all labels that are not ignored: each replica passes its number of them (`counted`)

A loss that the model computes itself is the mean over the global batch already, and is not affected.
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from shardwright.errors import InputError

from ..collectives import comm
from ..world import Groups

LossReduction = Literal["mean", "sum", "token"]


def reduction_fault(kind: str) -> str:
    """What is wrong with a reduction that a user names, if anything is."""
    return "" if kind in get_args(LossReduction) else f'reduction={kind!r} is not known; use "mean", "sum" or "token"'


class Reduction:
    """One kind, and with "token" the weight of this replica in the next backward."""

    def __init__(self, kind: LossReduction = "mean") -> None:
        if fault := reduction_fault(kind):
            raise InputError(fault)
        self.kind = kind
        self._weight: Tensor | None = None

    def weigh(self, output: Tensor, groups: int) -> Tensor:
        """An output of one of several replicas, with weighted gradient."""
        if not output.requires_grad:
            return output
        if self.kind == "mean":
            return comm.scale_gradient(output, 1.0 / groups)
        if self.kind == "sum":
            return output
        return comm.scale_gradient(output, self._counted)

    def set(self, own: int | Tensor, all: Tensor) -> None:
        if self.kind != "token":
            raise InputError(f'counting labels needs reduction="token", but this is reduction="{self.kind}"')
        self._weight = torch.as_tensor(own, dtype=all.dtype, device=all.device) / all.clamp(min=1)

    def _counted(self) -> Tensor:
        if self._weight is None:
            raise InputError(
                'with reduction="token" pass the number of labels of this replica before backward: '
                "model.counted((labels != -100).sum())"
            )
        return self._weight


def total(count: int | float | Tensor, groups: Groups, axes: tuple[str, ...], device: torch.device) -> Tensor:
    """The sum of a number over data-parallel replicas. All ranks must call it."""
    summed = torch.as_tensor(count, dtype=torch.float64, device=device).detach()
    for axis in axes:
        summed = comm.all_reduce_no_grad(summed, groups[axis])
    return summed

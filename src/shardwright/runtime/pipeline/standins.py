"""Leaves that the stages of a pipeline compute with instead of the model's parameters.

A schedule runs many backwards, and the sum of their gradients belongs to the user's one. So
stages don't use the parameters themselves, whose hooks would sync and count each of them, but
leaves that share their memory. Their `.grad` accumulates over microbatches, is taken when the
schedule is done, and is passed to the parameters in the user's backward.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..model.program import Program
from ..parameters.buckets import dense
from ..parameters.sharded import ShardedParameter, Untouched
from .spec import PlacedStage


class StandIns:
    """A leaf for each parameter of a rank, set in all modules that use it."""

    def __init__(self, placed: Sequence[PlacedStage]) -> None:
        self._places: dict[int, list[tuple[Program, str]]] = {}
        parameters: dict[int, ShardedParameter] = {}
        for stage in placed:
            if stage.stage is not None:
                for key, parameter in stage.parameters.items():
                    parameters[id(parameter)] = parameter
                    self._places.setdefault(id(parameter), []).append((stage.stage, key))
        self.parameters = list(parameters.values())
        self._leaves: list[Tensor | None] = [None] * len(self.parameters)

    def current(self) -> list[Tensor]:
        """The leaves, in the order of `parameters`; recreated where a parameter's memory has changed."""
        leaves = []
        with Untouched(), torch.inference_mode(False):  # inference tensors can't train later
            for number, parameter in enumerate(self.parameters):
                leaf = self._leaves[number]
                if leaf is None or not _same(leaf, parameter):
                    leaf = self._leaves[number] = parameter.detach().requires_grad_(parameter.requires_grad)
                    if parameter.requires_grad:
                        leaf.grad_dtype = parameter.grad_dtype
                    for stage, key in self._places[id(parameter)]:
                        stage.place(key, leaf)
                        if stage.zero is not None:
                            stage.zero.stand_in(parameter, leaf)
                leaves.append(leaf)
        return leaves

    @property
    def trained(self) -> list[ShardedParameter]:
        """The parameters that require a gradient."""
        with Untouched():
            return [parameter for parameter in self.parameters if parameter.requires_grad]


def _same(leaf: Tensor, parameter: Tensor) -> bool:
    return (
        leaf.data_ptr() == parameter.data_ptr()
        and leaf.requires_grad == parameter.requires_grad
        and leaf.dtype == parameter.dtype
        and leaf.shape == parameter.shape
        and leaf.stride() == parameter.stride()
    )


def harvest(leaves: Sequence[Tensor]) -> list[Tensor | None]:
    """Take the gradients of leaves."""
    gradients = [None if leaf.grad is None else dense(leaf.grad) for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients

"""A pipeline in an unmodified loop: a call of the model is one autograd function that runs a schedule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import Tensor

from ..gradients import GradientSync
from .parts import Pipeline

Backward = Literal["inside", "outside"]
"""Whether backward runs within the call of the model, seeded by its loss, or when the user calls it."""


class Loop:
    """What all entries of a model share on a rank: how it talks, and how its gradients become true.

    All ranks make it together, after the groups of all meshes.
    """

    def __init__(self, sync: GradientSync | None = None, backward: Backward = "inside") -> None:
        self.sync, self.backward = sync, backward


class Running:
    """One entry, ready to run."""

    def __init__(self, pipeline: Pipeline, loop: Loop) -> None:
        self.pipeline, self.loop = pipeline, loop

    def __call__(self, tensors: Sequence[Tensor], training: bool = True) -> tuple[Tensor, ...]:
        """The model's tensor outputs, whole on every rank. `training` as in `model.training`."""
        raise NotImplementedError

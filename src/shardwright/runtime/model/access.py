"""What other packages may see of a compiled model.

Functions, not attributes: an attribute of `ParallelModel` would hide one of the same name of the user's model.
"""

from __future__ import annotations

from torch import nn

from ..parameters.gradient_sync import Accumulation
from .parallel_model import ParallelModel
from .specialization import RankState


def state_of(model: ParallelModel) -> RankState:
    """The shards of this rank; it is an error if nothing was compiled yet."""
    return model._ready()


def is_compiled(model: ParallelModel) -> bool:
    """Whether a call was compiled, so that there are shards."""
    return model._state is not None


def skeleton_of(model: ParallelModel) -> nn.Module:
    """The original on meta, with the parameters of all stages."""
    skeleton: nn.Module = model._around["skeleton"]
    return skeleton


def accumulation_of(model: ParallelModel) -> Accumulation:
    """Which backward of a model sums gradients."""
    return model._turns


def show_again(model: ParallelModel) -> None:
    """Its submodules were put elsewhere: see them in the order of the skeleton's."""
    model._parts = list(model.modules())

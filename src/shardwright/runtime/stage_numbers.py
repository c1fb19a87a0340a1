"""Numbers that one stage of a pipeline made of its own parameters, such as a penalty that is added to the loss.

    loss = model(x, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

Every rank goes through the parameters of its stage only. The gradients of such a loss are right, since each parameter
gets its own. Its value is not, and differs between ranks. So it can be computed with and gone back through, and who
reads it is told what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

_READ = frozenset(
    "item tolist numpy __array__ __float__ __int__ __bool__ __index__ __format__ __complex__ __contains__ "
    "__reduce_ex__ is_nonzero equal allclose".split()
)


class StageNumber(Tensor):
    """A number about the parameters of this stage."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        expect_unread(func)
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **(kwargs or {}))
            return stage_number(made) if type(made) is Tensor else made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "StageNumber(about the parameters of one stage of a pipeline)"


def expect_unread(func: Callable[..., Any]) -> None:
    """Refuse a function that gives the value of a number of one stage away."""
    if getattr(func, "__name__", "") in _READ:
        raise InputError(
            "this number was made of parameters or gradients of one stage of a pipeline, those that this rank has, and "
            "is no number about the model; compute it in the model's forward, take norms of all stages with "
            "torch.nn.utils.get_total_norm, or leave its value alone: its gradients are right"
        )


def stage_number(made: Tensor) -> Tensor:
    return made.as_subclass(StageNumber)

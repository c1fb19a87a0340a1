"""Numbers that one stage of a pipeline made of its own parameters, such as a penalty that is added to the loss.

    loss = model(x, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

Every rank goes through the parameters of its stage only. The gradients of such a loss are right as long as it is a sum
of terms of one parameter each, since each parameter gets its own. Its value is not, and differs between ranks. So:

    of one parameter          anything may be computed with it
    of several, or the loss   sums and multiples only: the root of a sum over one stage has other gradients than that
                              over all of them
    its value                 is refused: whoever reads it gets an error
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardwright.errors import InputError

_READ = frozenset(
    "item tolist numpy __array__ __float__ __int__ __bool__ __index__ __format__ __complex__ __contains__ "
    "__reduce_ex__ is_nonzero equal allclose gt lt ge le eq ne __gt__ __lt__ __ge__ __le__ __eq__ __ne__ isnan isinf "
    "isfinite".split()
)
_LINEAR = frozenset(
    "add radd iadd sub rsub isub subtract neg negative pos positive sum nansum stack cat concat concatenate hstack "
    "clone detach to type type_as float double half bfloat16 cpu cuda contiguous view reshape flatten ravel squeeze "
    "unsqueeze expand unbind getitem backward requires_grad_ retain_grad register_hook get set delete repr".split()
)
_SCALES = frozenset("mul rmul imul multiply div truediv itruediv divide true_divide".split())
_LOSS = "the loss"


class StageNumber(Tensor):
    """A number, or what numbers are made of, about the parameters `of` this stage."""

    of: frozenset[str]

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(getattr(kind, "knows_stages", False) for kind in types):  # shards and their norms see to it
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            if func is torch.autograd.grad:
                return func(*args, **(kwargs or {}))
            of = combined(func, torch.utils._pytree.tree_leaves((args, kwargs)))
            return numbered(func(*args, **(kwargs or {})), of)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return "StageNumber(about the parameters of one stage of a pipeline)"


def numbered(result: Any, of: frozenset[str]) -> Any:
    """What was made of parameters of a stage, marked as that."""
    if isinstance(result, (tuple, list)) and all(type(item) is Tensor for item in result):
        return type(result)([numbered(item, of) for item in result])
    if type(result) is not Tensor:
        return result
    number = result.as_subclass(StageNumber)
    number.of = of
    return number


def combined(func: Callable[..., Any], leaves: Sequence[Any]) -> frozenset[str]:
    """Which parameters the result of a function is about; raises where it would be right on no rank."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    of: frozenset[str] = frozenset().union(*map(_names, tensors))
    name = str(getattr(func, "__name__", ""))
    if name in _READ and (len(of) > 1 or any(not tensor.ndim for tensor in tensors if _names(tensor))):
        raise InputError(
            "this number was made of parameters or gradients of one stage of a pipeline, those that this rank has, and "
            "is no number about the model; compute it in the model's forward, take norms of all stages with "
            "torch.nn.utils.get_total_norm, or leave its value alone: its gradients are right"
        )
    if len(of) > 1 and not _is_linear(name, leaves):
        raise InputError(
            f"{name.strip('_')} of {', '.join(sorted(of))}: in a pipeline each rank has the parameters of its own "
            "stage, and only a sum of terms of one parameter each has the gradients that it has on one device. Write "
            "sum(p.square().sum() for p in model.parameters()) or the like, compute it in the model's forward, or use "
            "a plan without pp"
        )
    return of


def is_of_stage(x: Any) -> bool:
    """Whether something is a parameter of a pipeline, a gradient or a norm of one."""
    return getattr(x, "stages", None) is not None


def _names(tensor: Any) -> frozenset[str]:
    if isinstance(tensor, StageNumber):
        return tensor.of
    if is_of_stage(tensor):
        return frozenset({tensor.spec.name if hasattr(tensor, "spec") else tensor.of})
    return frozenset({_LOSS}) if tensor.requires_grad else frozenset()


def _is_linear(name: str, leaves: Sequence[Any]) -> bool:
    base = name.strip("_")
    if base in _LINEAR:
        return True
    about = [isinstance(leaf, Tensor) and bool(_names(leaf)) for leaf in leaves]
    return base in _SCALES and sum(about) == 1 and (about[0] or "mul" in base)

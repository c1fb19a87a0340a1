"""`tensor.data` while a model is traced: the tensor without its gradient.

Reading `.data` is no op, so a trace would take what it gives for a constant. It is `detach()` here, which shares
memory too. What is written through it is written to the tensor. Where that has a gradient, autograd would not notice
and its backward would compute with what was written, so that is refused.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from ...errors import CaptureError
from .constant_values import writes

_DATA: Any = torch.Tensor.data


class TensorData(TorchFunctionMode):
    """Within this, `.data` is `.detach()`, and assigning to it is a copy."""

    def __init__(self) -> None:
        super().__init__()
        self.trained: dict[int, Tensor] = {}  # by their memory, tensors with a gradient whose data somebody has

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **(kwargs or {}))
        name = getattr(func, "__name__", "")
        if name == "__get__" and func.__self__ is _DATA:
            if args[0].requires_grad and not args[0].is_leaf:
                self.trained[args[0].untyped_storage()._cdata] = args[0]
            return args[0].detach()
        if name == "__set__" and func.__self__ is _DATA:
            return self._assign(args[0], args[1])
        if self.trained and writes(name, kwargs or {}):
            self._refuse(args[0] if (kwargs or {}).get("out") is None else kwargs["out"])
        return func(*args, **(kwargs or {}))

    def _assign(self, tensor: Tensor, value: Tensor) -> None:
        if (tensor.shape, tensor.dtype) != (value.shape, value.dtype):
            raise CaptureError(
                f"it assigns a tensor {list(value.shape)} of {value.dtype} to the data of one of {list(tensor.shape)} "
                f"and {tensor.dtype}, and values of a graph never change shape or dtype. Use a new variable."
            )
        if tensor.requires_grad and not tensor.is_leaf:
            raise _refusal(tensor)
        with torch.no_grad():
            tensor.detach().copy_(value)

    def _refuse(self, written: Any) -> None:
        for tensor in pytree.tree_leaves(written):
            if isinstance(tensor, Tensor) and not tensor.requires_grad:
                trained = self.trained.get(tensor.untyped_storage()._cdata)
                if trained is not None:
                    raise _refusal(trained)


def _refusal(tensor: Tensor) -> CaptureError:
    return CaptureError(
        f"it writes through .data to a tensor {list(tensor.shape)} that has a gradient: autograd would not notice, and "
        "compute its gradient with what was written. Write x = x.clamp(...) or x = torch.where(...) instead, or write "
        "in place under torch.no_grad()."
    )

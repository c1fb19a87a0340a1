"""Values that are known while a model is traced, since they depend on no input and no parameter.

A mask of ones that a model makes for itself has values, and so has what follows from it alone.
Where the model then branches on them (`if mask.all()`, `shapes.tolist()`), the answer is the same at every
call. Beside the trace such tensors are computed for real; a number that is taken out of one is
that number. A tensor that is a plain attribute of the model is part of the graph as it is, and
so is known too.

Writes in place are carried out on these values as well. What is written by something that is not known is
forgotten, and with it everything that shares its memory.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.weak import WeakIdKeyDictionary

_MAKERS = frozenset({"ones", "zeros", "full", "arange", "eye", "linspace"})
_LIKE = frozenset({"ones_like", "zeros_like", "full_like", "new_ones", "new_zeros", "new_full"})
_ABOUT = _MAKERS | _LIKE  # the result tells more than the inputs
_SHAPED = frozenset({"to", "type_as", "expand_as", "view_as", "reshape_as"})  # the other gives a shape or a dtype
_QUESTIONS = frozenset({
    "item", "tolist", "numpy", "__array__", "__bool__", "__int__", "__float__", "__index__", "__complex__",
    "__contains__", "equal", "allclose", "is_nonzero",
})  # fmt: skip
_DRAWS = re.compile(r"rand|bernoulli|normal|uniform|multinomial|poisson|dropout|empty|exponential|cauchy|geometric")
_UPDATING = frozenset({"batch_norm", "instance_norm"})  # they write to running statistics among their arguments
_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_LARGEST = 1 << 24  # elements: a mask of 4096 tokens by 4096


class ConstantValues(TorchFunctionMode):
    """Within this, tensors that depend on nothing answer questions about their values."""

    def __init__(self) -> None:
        super().__init__()
        self.values: Any = WeakIdKeyDictionary()
        self.written: Any = WeakIdKeyDictionary()  # tensors from outside of the trace that are no longer as they were

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether the values of a tensor are the same at every call."""
        if tensor not in self.values and tensor not in self.written and _from_outside(tensor):
            with _disable_current_modes():
                self.values[tensor] = tensor.detach().clone()  # the model's own stays as it is, whatever is written
        return tensor in self.values

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_dynamo_compiling():  # cond and scan are captured by dynamo, which would look in here
            return func(*args, **(kwargs or {}))
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name not in _ABOUT and args and isinstance(args[0], torch.Tensor) and not self.knows(args[0]):
            if self.values:
                self._forget_written(func, name, args, kwargs)
            return func(*args, **kwargs)  # nearly all calls: nothing can be known of what comes out
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        known = all(self.knows(leaf) for leaf in _deciding(name, tensors)) and not _is_foreign(func)
        known = known and not _DRAWS.search(name)
        if name in _QUESTIONS and tensors and known:
            return self.run(func, args, kwargs)
        if name in _ABOUT:  # arange(height), where height is a tensor
            like = args[:1] if name in _LIKE else ()
            rest, kwargs = pytree.tree_map(self._number, (args[len(like) :], kwargs))
            args = (*like, *rest)
        result = func(*args, **kwargs)
        if known:
            self._remember(func, args, kwargs, result, writes(name, kwargs))
        self._forget_written(func, name, args, kwargs, mirrored=known)
        return result

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of a call on known values, outside of the trace; None if an argument is a symbolic number."""
        with _disable_current_modes(), torch.no_grad():
            args, kwargs = pytree.tree_map(self._real, (args, kwargs))
            if any(isinstance(leaf, _SYMBOLS) for leaf in pytree.tree_leaves((args, kwargs))):
                return None
            return func(*args, **kwargs)

    def _remember(self, func: Any, args: Any, kwargs: Any, result: Any, written: bool) -> None:
        tensors = [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        large = any(leaf.numel() > _LARGEST or leaf.requires_grad for leaf in tensors)
        if (tensors or written) and not large:
            values = pytree.tree_leaves(self.run(func, args, kwargs))
            self.values.update(dict(_pairs(tensors, [leaf for leaf in values if isinstance(leaf, torch.Tensor)])))

    def _forget_written(self, func: Any, name: str, args: Any, kwargs: Any, mirrored: bool = False) -> None:
        unseen = name in _UPDATING or _is_foreign(func)
        if unseen or writes(name, kwargs):
            written = (args, kwargs) if unseen else args[0] if kwargs.get("out") is None else kwargs["out"]
            for leaf in pytree.tree_leaves(written):
                if isinstance(leaf, torch.Tensor):
                    self._forget(leaf, mirrored)

    def _forget(self, tensor: torch.Tensor, mirrored: bool = False) -> None:
        """A tensor was written to: what shares its memory is known only if its value was written to as well."""
        storage = tensor.untyped_storage()._cdata
        mirror = self.values[tensor].untyped_storage()._cdata if mirrored and tensor in self.values else None
        if _from_outside(tensor):
            self.written[tensor] = True
        for other in [other for other in self.values if other.untyped_storage()._cdata == storage]:
            if self.values[other].untyped_storage()._cdata != mirror:
                del self.values[other]

    def _number(self, argument: Any) -> Any:
        if isinstance(argument, torch.Tensor) and argument.dim() == 0 and self.knows(argument):
            with _disable_current_modes():
                return self.values[argument].item()
        return argument

    def _real(self, argument: Any) -> Any:
        """A known tensor as its values; a like-tensor needs only a shape; everything is on the CPU."""
        if isinstance(argument, torch.Tensor):
            return (
                self.values[argument]
                if argument in self.values
                else torch.empty((), dtype=argument.dtype).expand(argument.shape)
            )
        return torch.device("cpu") if isinstance(argument, torch.device) else argument


def _from_outside(tensor: torch.Tensor) -> bool:
    """Whether a tensor was there before the trace and is neither a parameter, a buffer nor an input: those are fake."""
    plain = not isinstance(tensor, FakeTensor | nn.Parameter) and type(tensor) is torch.Tensor
    return plain and not tensor.is_meta and not tensor.requires_grad and tensor.numel() <= _LARGEST


def _is_foreign(func: Any) -> bool:
    """Whether it is an op of somebody's library: it may write to what it is given, and need not run on the CPU."""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and not str(func).startswith("aten.")


def _deciding(name: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors of a call whose values count; of the others only shape and dtype do."""
    return tensors[1:] if name in _LIKE else tensors[:1] if name in _SHAPED else tensors


def writes(name: str, kwargs: Any) -> bool:
    """Whether a function of this name writes to its first argument, or to `out=`."""
    if kwargs.get("out") is not None or name in ("__setitem__", "__set__"):
        return True
    return (name.endswith("_") and not name.endswith("__")) or re.fullmatch(r"__i\w+__", name) is not None


def _pairs(tensors: list[torch.Tensor], values: list[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for tensor, value in zip(tensors, values, strict=True):
        if tensor.shape == value.shape and tensor.dtype == value.dtype:
            yield tensor, value

"""Parameters of the original after it was compiled: the shards are trained, and these are left behind.

Whoever still uses them trains nothing, clips nothing or saves what was there before training, and no number says so. So
they are marked, and refuse:

    what is done to one                      is it refused
    ---------------------------------------  -----------------------------------------------------------------
    its shape, dtype, device, ..             never
    its values (a call of the original,      once the shard has changed, or is gone: then they are stale
    state_dict(), a copy)
    its gradient, an optimizer, a write      always: this is for a parameter that is trained
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn

from shardwright.errors import InputError

Untouched = torch._C.DisableTorchFunctionSubclass


def _getter(name: str) -> Any:
    return getattr(Tensor, name).__get__


_DESCRIBES = {
    *(_getter(name) for name in ("shape", "dtype", "device", "ndim", "layout", "requires_grad", "is_meta", "is_cuda")),
    *(_getter(name) for name in ("is_cpu", "is_sparse", "is_quantized", "itemsize", "nbytes")),
    Tensor.dim, Tensor.size, Tensor.numel, Tensor.nelement, Tensor.element_size, Tensor.stride, Tensor.is_contiguous,
    Tensor.is_floating_point, Tensor.is_complex, Tensor.data_ptr, Tensor.__len__, Tensor.get_device,
}  # fmt: skip
_TRAINS = {_getter("grad"), _getter("is_leaf"), torch.autograd.grad}  # an optimizer asks for `is_leaf` when it is made


def _writes(name: str) -> bool:
    """Whether a function of this name changes a tensor: `mul_`, `requires_grad_`, setting an attribute or an item."""
    return name in ("__set__", "__delete__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


class ReplacedParameter(nn.Parameter):
    """A parameter for which a shard stands now."""

    key: str
    shard: ReferenceType[Tensor] | None  # None: this rank has none at all
    version: int

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in _DESCRIBES:
            trains = func in _TRAINS or _writes(getattr(func, "__name__", ""))
            for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
                if isinstance(leaf, ReplacedParameter):
                    leaf.check(trains)
        with Untouched():
            return func(*args, **(kwargs or {}))

    def check(self, trains: bool) -> None:
        """Raise if this parameter is trained, or if its values are read and are stale."""
        fault = self.fault(trains)
        if fault is not None:
            raise InputError(fault)

    def fault(self, trains: bool = False) -> str | None:
        """Why this parameter must not be trained, or read."""
        with Untouched():
            shard = None if self.shard is None else self.shard()
            stale = shard is None or shard._version != self.version
        if not trains and not stale:
            return None
        what = "is not trained any more" if trains else "has the values of before, not those of the compiled model"
        return (
            f"{self.key} is a parameter of the model as it was before sw.parallelize compiled it, and {what}. Use the "
            "model that parallelize returned, and its parameters(); pass every optimizer to parallelize, several as a "
            "list: sw.parallelize(model, [first, second]). An optimizer that is made afterwards needs a model that is "
            "compiled, which example= does at once. To continue with the original beside it, copy it before "
            "(copy.deepcopy), or load model.full_state_dict() into a new one"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        if id(self) not in memo:
            self.check(trains=False)
            with Untouched():
                memo[id(self)] = nn.Parameter(self.detach().as_subclass(Tensor).clone(), self.requires_grad)
        return cast(nn.Parameter, memo[id(self)])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"ReplacedParameter({self.key}, {tuple(self.shape)})"


def mark_replaced(keys: Mapping[str, nn.Parameter], replaced: Mapping[nn.Parameter, Tensor | None]) -> None:
    """Leave the parameters of an original behind. Where another rank has the shard, one that is here stands for it."""
    here = next((shard for shard in replaced.values() if shard is not None), None)
    for key, old in keys.items():
        if old not in replaced:
            continue
        shard = here if replaced[old] is None else replaced[old]
        old.__class__ = ReplacedParameter
        marked = cast(ReplacedParameter, old)
        with Untouched():
            marked.key, marked.shard = key, None if shard is None else ref(shard)
            marked.version = 0 if shard is None else shard._version

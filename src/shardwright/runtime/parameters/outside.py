"""What a user computes with parameters outside of the model: a penalty on weights, added to the loss.

    loss = model(x, y) + 0.01 * sum(p.square().sum() for p in model.parameters())

The gradient that comes to a parameter through the model is a part, which is summed over ranks. What
comes from outside is the same on all ranks that hold the parameter, and would count once for each.
So it is divided by their number on its way back. All ranks must compute the same.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shardwright.storage import effective_storage, summing_axes

from ..collectives import comm

_VIEWS = frozenset({"T", "mT", "H", "mH", "real", "imag"})  # properties that gradients come back through
_NO_USE = frozenset(  # what writes, or asks about a parameter
    f"__{name}__"
    for name in "set delete setitem setstate len bool nonzero int float complex long index contains format hash dir "
    "repr reduce reduce_ex deepcopy array array_wrap dlpack dlpack_device iadd isub imul itruediv idiv ifloordiv imod "
    "ipow imatmul iand ior ixor ilshift irshift".split()
)
_AS_THEY_ARE = frozenset(
    "grad backward detach register_hook register_post_accumulate_grad_hook retain_grad size dim numel ndimension "
    "element_size data_ptr stride storage_offset is_contiguous untyped_storage tolist item new_empty new_zeros "
    "new_ones new_full new_tensor empty_like zeros_like ones_like full_like result_type is_floating_point".split()
)


def is_use(function: Callable[..., Any]) -> bool:
    """Whether a function of parameters, called by the user, is one that gradients may come back through."""
    if not torch.is_grad_enabled() or is_inside():
        return False
    name = getattr(function, "__name__", "")
    if name == "__get__":
        return getattr(getattr(function, "__self__", None), "__name__", "") in _VIEWS
    if name.startswith("__"):
        return name not in _NO_USE
    return not name.endswith("_") and name not in _AS_THEY_ARE


_who = threading.local()  # runs: "user" or "model", where that is known


def is_inside() -> bool:
    """Whether what runs is a part of the model, or of an update of elements, and works on shards as they are.

    Where autograd runs that is so: a function's own backward may be written in Python.
    """
    known: str | None = getattr(_who, "runs", None)
    return known == "model" if known is not None else torch._C._current_graph_task_id() != -1


@contextmanager
def as_user() -> Iterator[None]:
    """Around a hook of the user's, which is no part of the model although autograd runs."""
    with _running("user"), torch._C._EnableTorchFunction():
        yield


@contextmanager
def as_model() -> Iterator[None]:
    """Around the update of an optimizer that is known to be elementwise."""
    with _running("model"):
        yield


@contextmanager
def as_anybody() -> Iterator[None]:
    """Around a closure that an update calls: it runs the model and backward as if there were no update around it."""
    with _running(None):
        yield


@contextmanager
def _running(who: str | None) -> Iterator[None]:
    before, _who.runs = getattr(_who, "runs", None), who
    try:
        yield
    finally:
        _who.runs = before


def used_outside(parameter: Any) -> Tensor:
    """The parameter, for a use outside of the model."""
    times = _times(parameter) if parameter.requires_grad else 1
    if times == 1:
        return parameter  # type: ignore[no-any-return]
    return comm.scale_gradient(parameter, 1.0 / times)


def _times(parameter: Any) -> int:
    """Over how many ranks that have the same gradient from outside it is summed."""
    spec, groups, stages = parameter.spec, parameter.groups, parameter.stages
    if groups is None:
        return 1
    sizes = groups.mesh.sizes
    if effective_storage(spec, sizes).shards_parameter:  # gradients from outside come to the share, and are not summed
        return 1
    ranks: int = math.prod(sizes[axis] for axis in summing_axes(spec, groups.mesh))
    return ranks * int(stages.count(spec.name)) if stages is not None else ranks

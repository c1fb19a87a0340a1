"""Captures that are kept: a model that is called in the same way again is captured once in a process.

Neither a rank nor a plan changes what a model computes, and capturing takes longer than the rest of most tests. A
capture is known by the pickled module (all it holds but the values of parameters and buffers), by the shapes of the
call, and by what torch is set to. A module that can't be pickled, or that has opaque parts, is captured every time.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.capture import Captured, capture
from shardwright.capture.auto import AUTO
from shardwright.capture.keep import CALLEES
from shardwright.capture.opaque import opaque_parts

MOST = 64
CALLERS = ("compile.compiler", "parallelize", "verify.original", "verify.parity", "verify.program")
_made: dict[bytes, Captured] = {}


def keep_captures() -> None:
    """Have nothing captured twice in this process."""
    for name in CALLERS:
        caller: Any = importlib.import_module(f"shardwright.{name}")
        caller.capture = captured


def captured(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, entry: str, promote: bool = False, real: Any
) -> Captured:
    """What `capture` gives, or gave."""
    key = _key(module, tuple(args), dict(kwargs), entry, promote)
    if key is None:
        return capture(module, args, kwargs, entry=entry, promote=promote, real=real)
    if key not in _made:
        if len(_made) == MOST:
            del _made[next(iter(_made))]
        _made[key] = capture(module, args, kwargs, entry=entry, promote=promote, real=real)
    return _made[key]


def _key(module: nn.Module, *call: Any) -> bytes | None:
    if AUTO in vars(module) or any(opaque_parts(module)):
        return None
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    setting = (torch.is_grad_enabled(), autocast, torch.get_default_dtype(), [id(held) for held in CALLEES.values()])
    written = io.BytesIO()
    try:
        _Described(written).dump((module, pytree.tree_map_only(Tensor, _like, call), setting))
    except (pickle.PicklingError, AttributeError, TypeError):  # what pickle says of lambdas, local classes, locks
        return None
    return written.getvalue()


def _like(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor).__name__, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad


class _Described(pickle.Pickler):
    """Tensors without values are written down by what they are like, and by whether two are one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.seen: dict[int, int] = {}

    def persistent_id(self, held: Any) -> Any:
        if not isinstance(held, Tensor):
            return None
        return self.seen.setdefault(id(held), len(self.seen)), _like(held), None if held.is_meta else held.tolist()

"""Captures that are kept: a model that is called in the same way again is captured once in a process.

Neither a rank nor a plan changes what a model computes, and capturing takes longer than the rest of most tests. A
capture is known by the pickled module (all it holds but the values of parameters and buffers), by the shapes of the
call, and by what torch is set to. A module that can't be pickled, or that has opaque parts, is captured every time.
"""

from __future__ import annotations

import importlib
import io
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from shardwright.capture import CapturedGraph, capture, capture_pair
from shardwright.capture.captured import NO_FACTS, MaskFacts
from shardwright.capture.user_calls.find_opaque import AUTO
from shardwright.capture.user_calls.kept import CALLEES
from shardwright.capture.user_calls.opaque import opaque_parts
from shardwright.ir import Graph
from shardwright.verify import original

MOST = 64
CALLERS = ("compile.compiler", "parallelize", "verify.parity", "verify.program", "rehearse.rehearsal")
_captured_graphs: dict[bytes | None, CapturedGraph] = {}


def keep_captures() -> None:
    """Have nothing captured twice in this process."""
    for name in CALLERS:
        caller: Any = importlib.import_module(f"shardwright.{name}")
        caller.capture = captured
    original.capture_pair = captured_pair  # type: ignore[attr-defined]


def captured(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, entry: str, promote: bool = False, real: Any,
    masks: MaskFacts = NO_FACTS,
) -> CapturedGraph:  # fmt: skip
    """What `capture` gives, or gave."""
    key = _key(module, tuple(args), dict(kwargs), entry, promote, masks.unpadded)
    stored = _captured_graphs.get(key)
    return stored or _keep(key, capture(module, args, kwargs, entry=entry, promote=promote, real=real, masks=masks))


def captured_pair(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], *, entry: str, real: Any,
    promote: Callable[[Graph], bool], masks: MaskFacts = NO_FACTS,
) -> tuple[CapturedGraph, CapturedGraph | None]:  # fmt: skip
    """What `capture_pair` gives, or gave."""
    keys = [_key(module, args, kwargs, entry, wanted, masks.unpadded) for wanted in (False, True)]
    plain, wide = (_captured_graphs.get(key) for key in keys)
    if plain is None or (wide is None and promote(plain.graph)):
        plain, wide = capture_pair(module, args, kwargs, entry=entry, real=real, promote=promote, masks=masks)
        _keep(keys[0], plain)
        if wide is not None:
            _keep(keys[1], wide)
    return plain, wide if promote(plain.graph) else None


def _keep(key: bytes | None, captured: CapturedGraph) -> CapturedGraph:
    if key is not None and not captured.fixed_buffers:  # which depends on values
        if len(_captured_graphs) >= MOST:
            del _captured_graphs[next(iter(_captured_graphs))]
        _captured_graphs[key] = captured
    return captured


def _key(module: nn.Module, *call: Any) -> bytes | None:
    if AUTO in vars(module) or any(opaque_parts(module)):
        return None
    autocast = torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu")
    setting = (
        torch.is_grad_enabled(),
        autocast,
        torch.get_default_dtype(),
        [id(callee) for callee in CALLEES.values()],
    )
    written = io.BytesIO()
    try:
        _Described(written).dump((module, pytree.tree_map_only(Tensor, _like, call), setting))
    except (pickle.PicklingError, AttributeError, TypeError, RuntimeError):  # lambdas, local classes, parametrizations
        return None
    return written.getvalue()


def _like(tensor: Tensor) -> tuple[Any, ...]:
    return type(tensor).__name__, tuple(tensor.shape), tensor.stride(), str(tensor.dtype), tensor.requires_grad


class _Described(pickle.Pickler):
    """Tensors without values are written down by what they are like, and by whether two are one."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.seen: dict[int, int] = {}

    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return None
        return self.seen.setdefault(id(value), len(self.seen)), _like(value), None if value.is_meta else value.tolist()

"""What tracing would silently drop, kept: custom backward functions and checkpointed regions.

`torch.export` runs the forward of a `torch.autograd.Function` and forgets its backward,
and it traces through `torch.utils.checkpoint` as if it were not there. Inside `keeping`
a user's Function becomes one marker op, and the ops of a checkpointed call are annotated
with the name of their region. Opaque submodules use the same marker (`opaque.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.fx.traceback
import torch.utils.checkpoint as checkpointing

REGION = "shardwright_region"
MARKER = "shardwright_capture.call.default"

_library: Any = torch.library.Library("shardwright_capture", "DEF")  # type: ignore[no-untyped-call]
_library.define("call(str key, Tensor[] tensors) -> Tensor[]")


class Marked(Protocol):
    """What a marker stands for."""

    def shapes(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Empty tensors of the shapes that it makes of these."""


@dataclass(slots=True)
class Call:
    """A call of a user's autograd function: its arguments, with a place number for each tensor."""

    function: type[torch.autograd.Function]
    arguments: list[Any]
    outputs: list[int | None] = field(default_factory=list)  # the marker's output, or None for None
    single: bool = True

    def shapes(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        arguments = [tensors[held.index] if isinstance(held, Position) else held for held in self.arguments]
        with torch.no_grad():
            result = _forward(self.function, arguments)
        self.single = not isinstance(result, tuple | list)
        leaves = [result] if self.single else list(result)
        found: list[torch.Tensor] = []
        self.outputs = []
        for leaf in leaves:
            self.outputs.append(len(found) if isinstance(leaf, torch.Tensor) else None)
            if isinstance(leaf, torch.Tensor):
                found.append(torch.empty_like(leaf))
        return found


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a tensor among a call's tensors."""

    index: int


@dataclass(slots=True)
class Kept:
    """What was kept in one trace."""

    calls: dict[str, Marked] = field(default_factory=dict)
    regions: int = 0
    wanting: tuple[str, Exception] | None = None  # an opaque submodule that only runs on real data, and why


_current: ContextVar[Kept | None] = ContextVar("shardwright_kept", default=None)


def current() -> Kept | None:
    """The trace that runs in this thread."""
    return _current.get()


@contextmanager
def paused() -> Iterator[None]:
    """Within this nothing is kept: what runs is no part of the trace."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


class _Context(torch.autograd.function.FunctionCtx):
    """The ctx that a forward sees while it is traced; what it keeps is thrown away."""

    needs_input_grad: tuple[bool, ...] = ()

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def _call_shapes(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    kept = _current.get()
    if kept is None:
        raise RuntimeError("the marker for functions that are kept was called outside of capture")
    return kept.calls[key].shapes(tensors)


torch.library.register_fake("shardwright_capture::call", _call_shapes, lib=_library)


def _forward(function: type[torch.autograd.Function], arguments: list[Any]) -> Any:
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*arguments)
    context = _Context()
    context.needs_input_grad = tuple(isinstance(held, torch.Tensor) and held.is_floating_point() for held in arguments)
    return function.forward(context, *arguments)


def _mark(kept: Kept, function: type[torch.autograd.Function], args: tuple[Any, ...]) -> Any:
    """The call of an autograd function as one marker op."""
    tensors: list[torch.Tensor] = []
    arguments: list[Any] = []
    for held in args:
        arguments.append(Position(len(tensors)) if isinstance(held, torch.Tensor) else held)
        if isinstance(held, torch.Tensor):
            tensors.append(held)
    key = f"#{len(kept.calls)}"
    call = kept.calls[key] = Call(function, arguments)
    found = torch.ops.shardwright_capture.call(key, tensors)
    leaves = [None if index is None else found[index] for index in call.outputs]
    return leaves[0] if call.single else tuple(leaves)


@contextmanager
def _region(kept: Kept) -> Iterator[None]:
    name = f"r{kept.regions}"
    kept.regions += 1
    with torch.fx.traceback.annotate({REGION: name}):
        yield


def _checkpointed(kept: Kept, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if _current.get() is not kept:
            yield from original(function, *args, **kwargs)
            return
        with _region(kept):
            yield

    return generator


@contextmanager
def keeping(kept: Kept) -> Iterator[None]:
    """Patch `Function.apply` and the two roads through `checkpoint` for the length of a trace."""
    original = torch.autograd.Function.__dict__["apply"]
    generator = checkpointing._checkpoint_without_reentrant_generator

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if _current.get() is not kept:  # another thread, which computes while this one traces
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is checkpointing.CheckpointFunction:
            function, _, *rest = args
            with _region(kept):
                return function(*rest)
        if cls.__module__.split(".")[0] == "torch" or kwargs:
            return original.__get__(None, cls)(*args, **kwargs)
        return _mark(kept, cls, args)

    token = _current.set(kept)
    patched: Any = torch.autograd.Function
    try:
        patched.apply = classmethod(apply)
        checkpointing._checkpoint_without_reentrant_generator = _checkpointed(kept, generator)
        with torch.fx.traceback.preserve_node_meta():
            yield
    finally:
        patched.apply = original
        checkpointing._checkpoint_without_reentrant_generator = generator
        _current.reset(token)

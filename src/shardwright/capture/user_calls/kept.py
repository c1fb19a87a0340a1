"""What tracing would silently drop, preserved: custom backward functions and checkpointed regions.

`torch.export` runs the forward of a `torch.autograd.Function` and forgets its backward,
and it traces through `torch.utils.checkpoint` as if it were not there. Inside `keeping`
a user's Function becomes one marker op, as does a registered function (callee.py), and the
ops of a checkpointed call are annotated with the name of their region. Opaque submodules use
the same marker (opaque.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import torch
import torch.utils.checkpoint as checkpointing
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import CaptureError
from ..building.call_paths import register_containers
from ..tracing.node_notes import REGION, set_note

MARKER = "shardwright_capture.call.default"

_library: Any = torch.library.Library("shardwright_capture", "DEF")  # type: ignore[no-untyped-call]
_library.define("call(str key, Tensor[] tensors) -> Tensor[]")


class RegisteredFunction(Protocol):
    """A registered function (callee.py): its place in the user's code, its parameters, and how it is run."""

    path: str
    names: tuple[str, ...]
    changed: tuple[int, ...]
    describe: Callable[..., Any] | None  # what it makes, if it can't run on fakes

    def run(self, *values: Any) -> Any: ...

    def run_plain(self, *values: Any) -> Any: ...

    def shapes(self, *values: Any) -> Any: ...


_FIXED = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)

CALLEES: dict[type[torch.autograd.Function], RegisteredFunction] = {}
"""Autograd functions that are registered."""


class MarkedCall(Protocol):
    """What a marker stands for."""

    def shapes(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Empty tensors of the shapes that it makes of these."""


@dataclass(slots=True)
class UserCall:
    """A call of a user's function: its arguments, with a place number for each tensor."""

    function: type[torch.autograd.Function] | RegisteredFunction
    arguments: list[Any]
    result: Any = None  # what it returns, with a place number for each tensor
    changed: dict[int, int] = field(default_factory=dict)  # tensors that it changes -> the marker's output

    def shapes(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        copies = [tensor.clone() for tensor in tensors]
        with torch.no_grad(), _Writes() as writes:
            result = self._try(map_places(self.arguments, copies))
        register_containers(result)
        leaves, spec = pytree.tree_flatten(result)
        outputs = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        self._check_nesting(result, len(outputs))
        numbers = iter(range(len(outputs)))
        fixed = [Position(next(numbers)) if isinstance(leaf, torch.Tensor) else self._fixed(leaf) for leaf in leaves]
        self.result = pytree.tree_unflatten(fixed, spec)
        own = registered_function(self)
        unseen = own.changed if own is not None and own.describe is not None else ()
        for at, tensor in enumerate(copies):
            if _storage(tensor) in writes.storages or at in unseen:
                known = [index for index, leaf in enumerate(outputs) if leaf is tensor]
                self.changed[at] = known[0] if known else len(outputs)
                outputs += [] if known else [tensor]
        return [torch.empty_like(tensor) for tensor in outputs]

    def _try(self, arguments: list[Any]) -> Any:
        """What it makes of tensors without values; a registered function may say so instead of being run."""
        own = registered_function(self)
        if own is None:
            return _forward(self.function, arguments)
        try:
            return own.shapes(*arguments) if own.describe is not None else _forward(self.function, arguments)
        except CaptureError:
            raise
        except Exception as error:
            reason = str(error).strip().split("\n")[0]
            raise CaptureError(
                f"{own.path} can't run on tensors without values ({type(error).__name__}: {reason}). Say what it makes "
                "with sw.register_op(..., shapes=lambda x: x.shape), or keep the submodule that calls it out of the "
                "graph with sw.opaque(submodule)."
            ) from error

    def _check_nesting(self, result: Any, count: int) -> None:
        """Autograd follows the tensors that a Function returns, and not those inside of what it returns."""
        outer = result if isinstance(result, tuple) else (result,)
        if isinstance(self.function, type) and sum(isinstance(value, torch.Tensor) for value in outer) < count:
            raise CaptureError(
                f"the autograd function {path_of(self.function)} returns tensors inside of a list, a dict or an "
                "object, and autograd gives them no gradient. Return a tuple of tensors."
            )

    def _fixed(self, leaf: Any) -> Any:
        """A result that is no tensor. It was computed without data, so it is the same at every call of this shape."""
        if leaf is None or isinstance(leaf, _FIXED):
            return leaf
        data = isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool)
        why = "a number that depends on data" if data else f"an object of type {type(leaf).__name__}"
        raise CaptureError(
            f"{path_of(self.function)} returns {why}, which a graph can't return. Return tensors, and besides them "
            "only numbers, strings and None that follow from shapes and arguments, or keep the submodule that calls "
            "it out of the graph with sw.opaque(submodule)."
        )


@dataclass(frozen=True, slots=True)
class Position:
    """The position of a tensor among a call's tensors."""

    index: int


@dataclass(slots=True)
class KeptCalls:
    """What was preserved in one trace."""

    calls: dict[str, MarkedCall] = field(default_factory=dict)
    regions: int = 0
    wanting: tuple[str, Exception] | None = None  # an opaque submodule that only runs on real data, and why


_current: ContextVar[KeptCalls | None] = ContextVar("shardwright_kept", default=None)


def current() -> KeptCalls | None:
    """The trace that runs in this thread."""
    return _current.get()


@contextmanager
def paused() -> Iterator[None]:
    """Within this nothing is preserved: what runs is no part of the trace."""
    token = _current.set(None)
    try:
        yield
    finally:
        _current.reset(token)


class _Context(torch.autograd.function.FunctionCtx):
    """The ctx that a forward sees while it is traced; what it saves is discarded."""

    needs_input_grad: tuple[bool, ...] = ()

    def set_materialize_grads(self, value: bool) -> None:
        self.materialize_grads = value


def _call_shapes(key: str, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    user_calls = _current.get()
    if user_calls is None:
        raise RuntimeError("the marker for registered functions was called outside of capture")
    return user_calls.calls[key].shapes(tensors)


class _Writes(TorchDispatchMode):
    """Notes the memory that ops write to."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.storages: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, torch.Tensor):
                self.storages.add(_storage(value))
        return func(*args, **(kwargs or {}))


def _storage(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def registered_function(call: UserCall) -> RegisteredFunction | None:
    """The registered function of a call, if it is registered."""
    return CALLEES.get(call.function) if isinstance(call.function, type) else call.function


def path_of(function: type[torch.autograd.Function] | RegisteredFunction) -> str:
    """Where a user's function stands in their code."""
    return f"{function.__module__}.{function.__qualname__}" if isinstance(function, type) else function.path


def map_places(value: Any, tensors: Sequence[Any]) -> Any:
    """Arguments with tensors where their positions stand."""
    if isinstance(value, Position):
        return tensors[value.index]
    return rebuilt(value, lambda inner: map_places(inner, tensors)) if isinstance(value, list | tuple) else value


def rebuilt(sequence: Any, change: Callable[[Any], Any]) -> Any:
    """A list, a tuple or a named tuple with other items."""
    items = [change(inner) for inner in sequence]
    return type(sequence)(*items) if hasattr(sequence, "_fields") else type(sequence)(items)


torch.library.register_fake("shardwright_capture::call", _call_shapes, lib=_library)


def _forward(function: type[torch.autograd.Function] | RegisteredFunction, arguments: list[Any]) -> Any:
    if not isinstance(function, type):
        return function.shapes(*arguments)
    if function.setup_context is not torch.autograd.Function.setup_context:
        return function.forward(*arguments)
    context = _Context()
    context.needs_input_grad = tuple(
        isinstance(argument, torch.Tensor) and argument.is_floating_point() for argument in arguments
    )
    return function.forward(context, *arguments)


def mark(
    user_calls: KeptCalls, function: type[torch.autograd.Function] | RegisteredFunction, args: Sequence[Any]
) -> Any:
    """The call of a user's function as one marker op."""
    tensors: list[torch.Tensor] = []

    def position(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            tensors.append(value)
            return Position(len(tensors) - 1)
        return rebuilt(value, position) if isinstance(value, list | tuple) else value

    arguments = [position(value) for value in args]
    key = f"#{len(user_calls.calls)}"
    call = user_calls.calls[key] = UserCall(function, arguments)
    outputs = torch.ops.shardwright_capture.call(key, tensors)
    own = registered_function(call)
    if own is not None:
        own.changed = tuple(call.changed)
    return pytree.tree_map_only(Position, lambda at: outputs[at.index], call.result)


@contextmanager
def _region(user_calls: KeptCalls) -> Iterator[None]:
    name = f"r{user_calls.regions}"
    user_calls.regions += 1
    before = set_note(REGION, name)
    try:
        yield
    finally:
        if _current.get() is user_calls:  # of a call that failed this comes with the garbage, perhaps in another trace
            set_note(REGION, before)


def _checkpointed(user_calls: KeptCalls, original: Callable[..., Iterator[None]]) -> Callable[..., Iterator[None]]:
    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Iterator[None]:
        if _current.get() is not user_calls:
            yield from original(function, *args, **kwargs)
            return
        with _region(user_calls):
            yield

    return generator


@contextmanager
def keeping(user_calls: KeptCalls) -> Iterator[None]:
    """Patch `Function.apply` and the two roads through `checkpoint` for the length of a trace."""
    original = torch.autograd.Function.__dict__["apply"]
    generator = checkpointing._checkpoint_without_reentrant_generator

    def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if _current.get() is not user_calls:  # another thread, which computes while this one traces
            return original.__get__(None, cls)(*args, **kwargs)
        if cls is checkpointing.CheckpointFunction:
            function, _, *rest = args
            with _region(user_calls):
                return function(*rest)
        if cls.__module__.split(".")[0] == "torch" or kwargs:
            return original.__get__(None, cls)(*args, **kwargs)
        return mark(user_calls, cls, args)

    token = _current.set(user_calls)
    patched: Any = torch.autograd.Function
    try:
        patched.apply = classmethod(apply)
        checkpointing._checkpoint_without_reentrant_generator = _checkpointed(user_calls, generator)
        yield
    finally:
        patched.apply = original
        checkpointing._checkpoint_without_reentrant_generator = generator
        _current.reset(token)

"""Methods of the user's model, other than `forward`, called on the compiled one.

    self(...)                    a method that calls the model itself (`generate`) is ordinary Python: each call of
                                 the model in it is a call of the compiled one
    self.encoder(x), self.w @ x  a method that calls a submodule or computes with a parameter (`encode`, `loss`) is
                                 compiled to its own program, with its arguments as inputs
    neither                      (`set_temperature`, `configure_optimizers`) is ordinary Python too

So a method starts as Python, with the modules that hold the shards as `self`. At the first submodule that it calls, or
parameter that it computes with, Python is abandoned and the method is compiled. If it has called the model by then, it
is refused: it would take shards for full parameters.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily

from shardwright.errors import CaptureError, InputError

from ..parameters.sharded import ShardedParameter

SAVING = "shardwright.checkpoint.save_weights(path, model) writes the full model in the Hugging Face format"
REFUSED = {
    "save_pretrained": f"it would save the shards of one rank; {SAVING}",
    "push_to_hub": f"it would upload the shards of one rank; {SAVING}",
    "resize_token_embeddings": "programs are compiled for the existing parameters; do it before sw.parallelize",
}
"""Methods that are known to go wrong on shards, and what to do instead."""

_SHAPE = frozenset({"numel", "nelement", "size", "shape", "__len__"})  # answered for the global parameter
_NEW = frozenset({"new_zeros", "new_ones", "new_full", "new_empty", "new_tensor"})
_ABOUT = frozenset(
    "dim ndimension ndim dtype device layout requires_grad requires_grad_ grad is_leaf retains_grad grad_fn is_meta "
    "is_cuda is_cpu is_sparse is_floating_point is_complex element_size get_device is_contiguous data_ptr __hash__ "
    "__repr__ __format__ register_hook register_post_accumulate_grad_hook _version _backward_hooks names is_quantized "
    "is_shared is_inference itemsize is_nested is_signed".split()
)
"""Attributes and methods of a parameter that don't need its values."""


class MethodHost(Protocol):
    """What a method needs of the compiled model."""

    training: bool

    @property
    def root(self) -> nn.Module | None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

    def parameters(self) -> Iterator[nn.Parameter]: ...

    def run_method(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any: ...


class NeedsProgram(Exception):
    """A method can't continue as Python."""


def method_of(model: Any, name: str, method: MethodType) -> Callable[..., Any]:
    """A method of the user's model, for the compiled one."""
    if name in REFUSED:
        raise InputError(f"{type(model.root).__name__}.{name} can't be called on a parallelized model: {REFUSED[name]}")

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        programs: set[str] = model._around.setdefault("methods", set())
        if name not in programs:
            try:
                with as_python(model, name):
                    return getattr(model.root, name)(*args, **kwargs)
            except NeedsProgram:
                programs.add(name)
            except (AttributeError, TypeError) as error:
                if not _misses_a_stage(model, error):
                    raise
                programs.add(name)  # in a pipeline a program has the parameters of other stages
        try:
            return model.run_method(name, args, kwargs)
        except CaptureError as error:
            raise CaptureError(
                f"{type(model.root).__name__}.{name} can't be called on a parallelized model: it uses submodules or "
                f"parameters, so it has to be compiled, and\n{error}\nCall the model itself in it (self(...)) "
                "instead of its submodules, or call it on an uncompiled model on one device that has loaded "
                "model.full_state_dict()",
                error.path,
            ) from error

    return call


def property_of(model: Any, name: str) -> Any:
    """A property of the user's model, for the compiled one: sizes are those of global parameters."""
    what = f"the property {name} of {type(model.root).__name__}"
    remedy = "make it a method, which is compiled, or read it before sw.parallelize"
    try:
        with as_python(model, name):
            value = getattr(model.root, name)
    except NeedsProgram:
        fault = f"{what} computes with submodules or parameters, of which ranks hold shards; {remedy}"
        raise InputError(fault) from None
    except (AttributeError, TypeError) as error:  # nn.Module only says that there is no such attribute
        if not model._state.pp_ranks:
            raise
        raise InputError(f"{what} reads a parameter that another stage of the pipeline holds; {remedy}") from error
    return value


def _misses_a_stage(model: Any, error: Exception) -> bool:
    """Whether an error comes from a parameter that is None on this rank of a pipeline."""
    holding = model._state
    return "NoneType" in str(error) and holding is not None and bool(holding.pp_ranks)


class MethodMode(TorchFunctionMode):
    """Within this context a method runs as Python, and is stopped where it would compute with shards."""

    def __init__(self, model: MethodHost, root: nn.Module, name: str) -> None:
        super().__init__()
        self._model, self._root, self._name = model, root, name
        self._known = {id(parameter) for parameter in model.parameters()}
        self._called = False

    @contextmanager
    def calling(self) -> Iterator[None]:
        """Within this context, a call of the user's model is a call of the compiled one."""
        own = vars(self._root).get("forward")

        @functools.wraps(MethodType(type(self._root).forward, self._root))  # keeps the signature of forward
        def forward(*args: Any, **kwargs: Any) -> Any:
            self._called = True
            self._model.training = self._root.training  # the method may have called self.eval()
            _put_back(self._root, own)  # the original may be compiled now, unpatched
            try:
                with _pop_mode_temporarily(), _outside():
                    return self._model(*args, **kwargs)
            finally:
                vars(self._root)["forward"] = forward

        vars(self._root)["forward"] = forward
        self._root.training = self._model.training
        try:
            yield
        finally:
            self._model.training = self._root.training
            _put_back(self._root, own)

    def touch(self, what: str) -> None:
        """The method is about to compute with a part of the model."""
        if not self._called:
            raise NeedsProgram
        raise InputError(
            f"{type(self._root).__name__}.{self._name} {what} after it has called the model, but a parallelized "
            "model holds shards; do both in forward, do this before the model is called, or in a separate method"
        )

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for argument in (*args, *(kwargs or {}).values()):
            for item in argument if isinstance(argument, list | tuple) else (argument,):
                if isinstance(item, nn.Parameter) and id(item) in self._known:
                    name = _name_of(func)
                    if name in _SHAPE:
                        return _full_shape(name, item, args)
                    if name in _NEW:
                        return func(item.detach().as_subclass(Tensor), *args[1:], **(kwargs or {}))
                    if name not in _ABOUT:
                        self.touch(f"computes with a parameter ({name})")
        return func(*args, **(kwargs or {}))


def _name_of(func: Any) -> str:
    """The name of the called function, or of the attribute that is read or set."""
    name = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name in ("__get__", "__set__") else name


def _full_shape(name: str, parameter: nn.Parameter, args: tuple[Any, ...]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        shape = torch.Size(parameter.spec.shape if isinstance(parameter, ShardedParameter) else parameter.shape)
    if name in ("numel", "nelement"):
        return math.prod(shape)
    if name == "__len__":
        return shape[0]
    return shape[args[1]] if len(args) > 1 else shape


_RUNNING: ContextVar[MethodMode | None] = ContextVar("shardwright_method", default=None)


def running() -> MethodMode | None:
    """The method that is running as Python in this thread."""
    return _RUNNING.get()


@contextmanager
def _outside() -> Iterator[None]:
    """Within this context no method runs: the compiled model does."""
    token = _RUNNING.set(None)
    try:
        yield
    finally:
        _RUNNING.reset(token)


@contextmanager
def as_python(model: Any, name: str) -> Iterator[None]:
    """Within this context a method of the user's model runs as Python."""
    mode = MethodMode(model, model.root, name)
    token = _RUNNING.set(mode)
    try:
        with mode.calling(), mode:
            yield
    finally:
        _RUNNING.reset(token)


def _put_back(root: nn.Module, forward: Any) -> None:
    vars(root).pop("forward", None)
    if forward is not None:
        vars(root)["forward"] = forward

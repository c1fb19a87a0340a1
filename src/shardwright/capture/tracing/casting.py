"""A precision put into a module: parameters and buffers cast, autocast and casts of inputs around its forward.

    cast(module, precision)            the dtypes of its parameters and buffers, for good
    with casting(module, precision):   its forwards, while it is captured

With both, an ordinary module does on one device what the compiled model does. What is captured within has all casts
in its graph, so that nothing downstream knows of precisions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ...errors import InputError, raise_all
from ...precision import Precision

Forward = Callable[..., Any]


def cast(module: nn.Module, precision: Precision) -> nn.Module:
    """Give the floating-point parameters and buffers of a module the dtypes of a precision; the same module."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    precision.check_patterns([*parameters, *buffers])
    _check_tied(parameters, precision)
    for key, parameter in parameters.items():
        dtype = _wanted(key, parameter, precision, buffer=False)
        if parameter.dtype != dtype:
            parameter.data = parameter.data.to(dtype)
    for path, part in module.named_modules():
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(_wanted(f"{path}.{name}".lstrip("."), buffer, precision, buffer=True))
    return module


def _wanted(key: str, tensor: Tensor, precision: Precision, buffer: bool) -> torch.dtype:
    name = precision.dtype_of(key, buffer) if tensor.is_floating_point() else None
    return tensor.dtype if name is None else _dtype(name)


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _check_tied(parameters: dict[str, nn.Parameter], precision: Precision) -> None:
    first: dict[int, str] = {}
    faults = []
    for key, parameter in parameters.items():
        other = first.setdefault(id(parameter), key)
        if precision.dtype_of(key) != precision.dtype_of(other):
            faults.append(f"{other} and {key} are one parameter, and overrides give them two dtypes")
    raise_all(InputError, "overrides of the precision:", faults)


@contextmanager
def casting(module: nn.Module, precision: Precision, device: str = "cpu") -> Iterator[None]:
    """Within this, calls of the module cast what a precision casts. Captures are made as if on the CPU."""
    before = {part: vars(part).get("forward") for part in module.modules()}
    try:
        for path, part in module.named_modules() if precision.overrides else ():
            dtype = _own_dtype(path, part, precision)
            if dtype is not None and part is not module:
                part.forward = _apart(part.forward, dtype, device)
        if precision.compute or precision.inputs:
            module.forward = _around(module.forward, precision, device)
        yield
    finally:
        for part, own in before.items():
            vars(part).pop("forward", None)
            if own is not None:
                part.forward = own


def _own_dtype(path: str, module: nn.Module, precision: Precision) -> torch.dtype | None:
    """The dtype that overrides give to the parameters that a module has itself."""
    lead = f"{path}." if path else ""
    own = {
        name: parameter
        for name, parameter in module._parameters.items()
        if parameter is not None and parameter.is_floating_point()
    }
    overrides = {name: precision.override(lead + name) for name in own}
    kinds = {dtype for dtype in overrides.values() if dtype is not None}
    if not kinds:
        return None
    if len(kinds) > 1 or None in overrides.values():
        raise InputError(
            f"overrides give the parameters of {path} several dtypes ({overrides}), and a module computes in one; "
            f"use the pattern '{lead}*'"
        )
    return _dtype(kinds.pop())


def _around(forward: Forward, precision: Precision, device: str) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        if precision.inputs is not None:
            args, kwargs = _floats((args, kwargs), _dtype(precision.inputs))
        region = torch.autocast(device, _dtype(precision.compute)) if precision.compute else nullcontext()
        with region:
            return forward(*args, **kwargs)

    return run


def _apart(forward: Forward, dtype: torch.dtype, device: str) -> Forward:
    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        came = next((x.dtype for x in pytree.tree_leaves((args, kwargs)) if _floating(x)), dtype)
        args, kwargs = _floats((args, kwargs), dtype)
        with torch.autocast(device, enabled=False):
            return _floats(forward(*args, **kwargs), came)

    return run


def _floats(tree: Any, dtype: torch.dtype) -> Any:
    return pytree.tree_map_only(Tensor, lambda x: x.to(dtype) if _floating(x) else x, tree)


def _floating(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_floating_point()

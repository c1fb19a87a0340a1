"""A function of the user's that stays one op: outside of a capture it is called as ever, inside it is a marker.

Graphs are functional, so a function that changes its arguments is run on copies of them, and what it
changed is a result of the op.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ...errors import InputError, RuleError
from ..building.call_paths import register_containers
from .kept import current, mark, rebuilt

REGISTERED = "shardwright_registered"
"""The attribute of a registered function that has the original."""


class Callee:
    """How a function is called with values for all its parameters, in order."""

    def __init__(
        self, function: Callable[..., Any], path: str, signature: inspect.Signature | None = None,
        describe: Callable[..., Any] | None = None,
    ) -> None:  # fmt: skip
        self.function, self.path, self.describe = function, path, describe
        self.signature = signature or _signature_of(function, path)
        for parameter in self.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                raise RuleError(f"{path} takes **{parameter.name}: an op needs names for all of its arguments")
        self.names = tuple(self.signature.parameters)
        self.changed: tuple[int, ...] = ()  # the tensors that it changes, counted along the arguments
        self.compared = describe is None  # whether a call was seen to match `describe`

    def values(self, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
        """A value for every parameter."""
        bound = self.signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return list(bound.arguments.values())

    def run(self, *values: Any) -> Any:
        """Call the function and leave its arguments as they are; what it changes comes after what it returns."""
        return self._run(self.function, values)

    def run_plain(self, *values: Any) -> Any:
        """The same without torch.compile, which would compile it for every shape that is tried."""
        return self._run(uncompiled(self.function), values)

    def _run(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        tensors = flat(values)
        copies = {at: tensors[at].clone() for at in self.changed}
        arguments = replace_tensors(values, [copies.get(at, x) for at, x in enumerate(tensors)])
        result = self._call(function, arguments) if self.compared else self._compare(function, arguments)
        results = tensors_of(result)
        results += [copy for copy in copies.values() if not any(copy is tensor for tensor in results)]
        return results[0] if len(results) == 1 else tuple(results)

    def shapes(self, *values: Any) -> Any:
        """Call it on tensors without numbers, unless shapes were given. A compiled function is called as written."""
        return self._call(uncompiled(self.function), values) if self.describe is None else self._described(values)

    def _described(self, values: Sequence[Any]) -> Any:
        tensors = flat(values)
        like = next((x for x in tensors if x.is_floating_point()), tensors[0] if tensors else torch.empty(0))

        def empty(shape: Any) -> Any:
            if isinstance(shape, tuple | list) and all(isinstance(size, int) for size in shape):
                return like.new_empty(tuple(shape))
            return tuple(empty(inner) for inner in shape) if isinstance(shape, tuple | list) else shape

        assert self.describe is not None
        return empty(self._call(self.describe, values))

    def _compare(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        """The first call of a function that was not run in the trace must match its `shapes`."""
        tensors = flat(values)
        before = [x.detach().clone() for x in tensors]
        wanted = [(tuple(x.shape), x.dtype) for x in tensors_of(self._described(values))]
        result = self._call(function, values)
        returned = [(tuple(x.shape), x.dtype) for x in tensors_of(result)]
        if returned != wanted:
            raise InputError(f"{self.path} returned {_shown(returned)}, and its shapes= gives {_shown(wanted)}")
        for at, (x, y) in enumerate(zip(tensors, before, strict=True)):
            if at not in self.changed and not torch.equal(x, y):
                raise InputError(
                    f"{self.path} changes its tensor argument {at}, which its shapes= can't say; give register_op "
                    "inputs to check it on (probe=), or have it write to a copy"
                )
        self.compared = True
        return result

    def _call(self, function: Callable[..., Any], values: Sequence[Any]) -> Any:
        bound = inspect.BoundArguments(self.signature, dict(zip(self.names, values, strict=True)))
        return function(*bound.args, **bound.kwargs)


def _signature_of(function: Callable[..., Any], path: str) -> inspect.Signature:
    try:
        return inspect.signature(uncompiled(function))
    except ValueError as error:
        remedy = "register a Python function around it"
        raise RuleError(
            f"{path} does not say what its parameters are (it is not written in Python); {remedy}"
        ) from error


def _shown(tensors: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> str:
    return ", ".join(f"{list(shape)} of {str(dtype).removeprefix('torch.')}" for shape, dtype in tensors) or "no tensor"


def keep_as_one_op(callee: Callee) -> Callable[..., Any]:
    """The function as the user calls it."""

    @functools.wraps(uncompiled(callee.function))
    def call(*args: Any, **kwargs: Any) -> Any:
        user_calls = current()
        if user_calls is None:
            return callee.function(*args, **kwargs)
        return mark(user_calls, callee, callee.values(args, kwargs))

    vars(call)[REGISTERED] = callee.function
    return call


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that torch.compile was given, or the function itself."""
    original: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    return original


def flat(values: Any) -> list[torch.Tensor]:
    """The tensors among some values, in order."""
    if isinstance(values, torch.Tensor):
        return [values]
    return [x for value in values for x in flat(value)] if isinstance(values, list | tuple) else []


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors that a function returns, in order, whatever they are nested in."""
    if isinstance(result, torch.Tensor):
        return [result]
    register_containers(result)
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, torch.Tensor)]


def replace_tensors(values: Sequence[Any], tensors: Sequence[torch.Tensor]) -> list[Any]:
    """The values with other tensors."""
    left = iter(tensors)

    def change(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return next(left)
        return rebuilt(value, change) if isinstance(value, list | tuple) else value

    return [change(value) for value in values]

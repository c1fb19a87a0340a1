"""Calls of ops for tests: the op with the values it reads and makes, without capturing a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shardwright.ir import Dtype, Op, Slot, Value
from shardwright.rules import OpCall


def randn(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def ids(*shape: int, top: int = 4) -> Tensor:
    return torch.randint(top, shape)


def flags(*shape: int) -> Tensor:
    return torch.rand(shape) < 0.5


def make_call(target: str, *args: Any, gradient: bool = True, **kwargs: Any) -> OpCall:
    """The call of an op by its name ("linear", "sum.dim_IntList"), its floats with a gradient."""
    full = target if target.count(".") == 2 else ".".join(f"aten.{target}.default".split(".")[:3])
    space, name, overload = full.split(".")
    op = getattr(getattr(getattr(torch.ops, space), name), overload)
    named = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | kwargs
    arguments, tensors = placed(named)
    buffers = [value for key, value in named.items() if key.startswith("running_")]
    for x in tensors:
        x.requires_grad_(gradient and x.is_floating_point() and not any(x is buffer for buffer in buffers))
    result = op(**named)
    built = result if isinstance(result, tuple | list) else (result,)
    inputs = tuple(value(f"x{at}", x) for at, x in enumerate(tensors))
    outputs = tuple(value(f"y{at}", y) for at, y in enumerate(built))
    read, written = (tuple(value.name for value in values) for values in (inputs, outputs))
    return OpCall(Op(name=f"/ {name}", target=full, inputs=read, outputs=written, arguments=arguments), inputs, outputs)


def placed(named: Mapping[str, Any]) -> tuple[tuple[tuple[str, Any], ...], list[Tensor]]:
    """Arguments as an op has them, slots where tensors go, and these."""
    tensors: list[Tensor] = []

    def argument(value: Any) -> Any:
        if isinstance(value, Tensor):
            tensors.append(value)
            return Slot(len(tensors) - 1)
        if isinstance(value, torch.dtype):
            return Dtype(str(value).removeprefix("torch."))
        return tuple(argument(inner) for inner in value) if isinstance(value, list | tuple) else value

    return tuple((key, argument(value)) for key, value in named.items()), tensors


def value(name: str, x: Tensor) -> Value:
    return Value(name=name, shape=tuple(x.shape), dtype=str(x.dtype).removeprefix("torch."), gradient=x.requires_grad)

"""Calls of single ops, made by hand or captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardwright.capture import capture
from shardwright.cluster import KINDS, Curve, Device, Efficiency
from shardwright.cost import LocalCall, LocalTensor, TrainingSetup, local_call
from shardwright.ir import Op
from shardwright.layout import Mesh
from shardwright.rules import Signature, analyse

FLAT = tuple(Efficiency(kind=kind, curve=Curve(((1.0, 0.5),))) for kind in KINDS)
HALF = Device(name="half", flops=(("float32", 2e12), ("bfloat16", 8e12)), memory=2**30, bandwidth=2e9, efficiency=FLAT)
"""A device that reaches half of everything at every size: 1e12 flops in float32, 1e9 bytes a second."""


def tensor(*shape: int, gradient: bool = True, dtype: str = "float32", parameter: bool = False) -> LocalTensor:
    elements = 1.0
    for size in shape:
        elements *= size
    item = {"float32": 4, "bfloat16": 2, "int64": 8}[dtype]
    return LocalTensor(elements=elements, item=item, dtype=dtype, gradient=gradient, parameter=parameter)


def call(
    kind: str, inputs: Sequence[LocalTensor], outputs: Sequence[LocalTensor], flops: float = 0.0, **rest: Any
) -> LocalCall:
    names = tuple(f"x{at}" for at in range(len(inputs)))
    results = tuple(f"y{at}" for at in range(len(outputs)))
    op = Op(
        name=rest.pop("name", f"/ {kind}"), target=f"aten.{kind}.default", inputs=names, outputs=results,
        arguments=tuple(rest.pop("arguments", {}).items()),
    )  # fmt: skip
    return LocalCall(op=op, flops=flops, inputs=tuple(inputs), outputs=tuple(outputs), **rest)


def linear(
    rows: int, wide: int, out: int, *, data: bool = True, weight: bool = True, dtype: str = "float32"
) -> LocalCall:
    """[rows, wide] by [out, wide], of which some have a gradient."""
    tensors = [tensor(rows, wide, gradient=data, dtype=dtype), tensor(out, wide, gradient=weight, dtype=dtype)]
    output = tensor(rows, out, gradient=data or weight, dtype=dtype)
    return call("linear", tensors, [output], flops=2.0 * rows * wide * out)


def signatures(module: nn.Module, *args: torch.Tensor) -> dict[str, Signature]:
    """The signatures of a module's ops, by the names of their kinds."""
    by_op = analyse(capture(module, args).graph).signatures
    return {signature.op.target: signature for signature in by_op.values()}


def whole(signature: Signature) -> LocalCall:
    return local_call(signature, {}, Mesh(axes=()), TrainingSetup())

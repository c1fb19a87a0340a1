"""The arguments of a call by name, as literals that a graph can hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from ...ir import Dtype, SourceLine
from ..failure import unsupported
from .graph_builder import ValueInfo

DROPPED = frozenset({"device", "layout", "pin_memory", "memory_format", "non_blocking", "copy", "generator"})


def target_name(op: torch._ops.OpOverload[..., Any]) -> str:
    """The name of an op in a graph, such as "aten.linear.default"."""
    return f"{op.namespace}.{op._opname}.{op._overloadname}"


@lru_cache(maxsize=4096)
def torch_op(target: str) -> Any:
    """The torch op of a name in a graph; None for what is not one of torch's (a user's function, an opaque part)."""
    space, _, rest = target.partition(".")
    name, _, overload = rest.partition(".")
    packet = getattr(getattr(torch.ops, space, None), name, None) if space != "call" else None
    return getattr(packet, overload, None) if packet is not None else None


def is_random_call(op: Any, arguments: Mapping[str, Any]) -> bool:
    """Whether a call draws random numbers: torch tags such ops, and a dropout of 0 or in evaluation draws none."""
    if op is None or torch.Tag.nondeterministic_seeded not in op.tags:
        return False
    values = {
        argument.name: arguments.get(argument.name, argument.default_value if argument.has_default_value() else None)
        for argument in op._schema.arguments
    }
    chances = [values[name] for name in ("dropout_p", "dropout", "p") if isinstance(values.get(name), int | float)]
    return 0 not in chances and not any(values.get(name) is False for name in ("train", "training"))


def named_arguments(
    op: torch._ops.OpOverload[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    convert: Callable[[Any], Any],
) -> dict[str, Any]:
    """The arguments of a call under their schema names, defaults left out."""
    named: dict[str, Any] = {}
    for index, argument in enumerate(op._schema.arguments):
        if index < len(args):
            argument_value = args[index]
        elif argument.name in kwargs:
            argument_value = kwargs[argument.name]
        else:
            continue
        if op.namespace == "aten" and (argument.name in DROPPED or _is_hint(argument)):
            continue
        value = convert(argument_value)
        if argument.has_default_value() and _same(value, argument.default_value):
            continue
        named[argument.name] = value
    return named


def _is_hint(argument: Any) -> bool:
    """Whether an argument only chooses a kernel."""
    return str(argument.name).startswith("cudnn") and bool(argument.has_default_value())


def _same(value: Any, default: Any) -> bool:
    if isinstance(default, list):
        default = tuple(default)
    return type(value) is type(default) and bool(value == default)


def literal(value: Any, source: SourceLine | None) -> Any:
    """A literal argument in the form that graphs use."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return Dtype(str(value).removeprefix("torch."))
    if isinstance(value, list | tuple):
        return tuple(literal(inner, source) for inner in value)
    if isinstance(value, dict) and all(isinstance(name, str) for name in value):
        return {name: literal(inner, source) for name, inner in value.items()}
    if isinstance(value, complex | torch.device | torch.layout | torch.memory_format):
        return str(value)
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise unsupported(
            "a size or a number there depends on the values of a tensor (nonzero, boolean mask, .item())",
            source,
            "Keep shapes fixed (torch.where instead of a mask), or keep the submodule out with sw.opaque(submodule).",
        )
    raise unsupported(f"an argument of type {type(value).__name__} can't be put in a graph", source, "Pass a tensor.")


def value_info(tensor: torch.Tensor, source: SourceLine | None = None) -> ValueInfo:
    if tensor.layout is not torch.strided or tensor.is_quantized:
        kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
        remedy = "Make it dense (to_dense, sparse=False), or keep the submodule out with sw.opaque(submodule)."
        raise unsupported(f"a tensor there is {kind}, and a graph has dense tensors only", source, remedy)
    shape = tuple(literal(size, source) for size in tensor.shape)
    return ValueInfo(shape, str(tensor.dtype).removeprefix("torch."), tensor.requires_grad)


def value_infos(values: Any, source: SourceLine | None = None) -> list[ValueInfo]:
    """The facts of what an op gives: one tensor, or several."""
    every = values if isinstance(values, tuple | list) else [values]
    if any(isinstance(value, tuple | list) for value in every):
        remedy = "Keep the submodule out with sw.opaque(submodule)."
        raise unsupported("the op returns a list of tensors and other tensors", source, remedy)
    return [value_info(value, source) for value in every if isinstance(value, torch.Tensor)]

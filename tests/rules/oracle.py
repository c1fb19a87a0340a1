"""Every split of every op of a module, put to `shardwright.probe.check_role`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.capture.interpret import run
from shardwright.ir import Op
from shardwright.probe import check_role
from shardwright.probe.check import WrongSplit
from shardwright.rules import Analysis, analyse

Observed = dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def observe(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Analysis, Observed]:
    """A module's graph analysed, and for every op what went in and came out."""
    captured = capture(module, tuple(args), dict(kwargs or {}))
    seen: Observed = {}

    def keep(op: Op, inputs: tuple[Tensor, ...], outputs: tuple[Tensor, ...]) -> None:
        seen[op.name] = tuple(x.detach() for x in inputs), tuple(x.detach() for x in outputs)

    with torch.no_grad():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = {key: buffer.clone() for key, buffer in module.named_buffers(remove_duplicate=False)}
        run(captured, captured.flatten(args, kwargs or {}), parameters, buffers, callback=keep)
    return analyse(captured.graph), seen


def splits(analysis: Analysis, parts: Sequence[int] = (2, 3)) -> Iterator[tuple[Op, str, int]]:
    """Every op with every role that it has, once for each kind, shape and set of arguments."""
    known = set()
    for op in analysis.graph.ops:
        shapes = tuple(analysis.graph.values[name].shape for name in (*op.inputs, *op.outputs))
        arguments = tuple((name, repr(value)) for name, value in op.arguments)
        for role in analysis.signatures[op.name].roles:
            for count in parts:
                key = (op.target, arguments, shapes, role.name, count)
                if role.fills(count) and key not in known:
                    known.add(key)
                    yield op, role.name, count


def check_split(analysis: Analysis, seen: Observed, op: Op, role: str, parts: int) -> bool:
    """Assert that the split is right; False where an algorithm of the runtime does it (tested there).

    Raises NothingProven if a result or a gradient is finite nowhere.
    """
    if op.target.startswith("call."):
        return False
    try:
        return check_role(analysis, op, role, parts, seen[op.name][0])
    except WrongSplit as error:
        raise AssertionError(str(error)) from error

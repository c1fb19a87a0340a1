"""The values of tensors that depend on no input: what ops make of constants and buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ...ir import Dtype
from ..building.finish import is_pure
from ..building.graph_builder import DraftOp, GraphBuilder, map_refs
from ..building.schema import torch_op

LARGEST_VALUE = 1 << 22
"""Elements: a mask of 2,048 tokens by 2,048."""


@dataclass(slots=True)
class KnownValues:
    builder: GraphBuilder
    tensors: Mapping[str, Tensor]  # of constants, and of buffers
    used: set[str]  # of them, those that were looked at
    producers: dict[str, DraftOp] = field(default_factory=dict)
    evaluated: dict[str, Tensor | None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.producers = {name: step for step in self.builder.steps for name in step.outputs}

    def evaluate(self, name: str) -> Tensor | None:
        """The values of a tensor that depends on no input and is not too large; None for all others."""
        if name in self.tensors:
            return self._tensor(name) if self.tensors[name].numel() <= LARGEST_VALUE else None
        for step in self._before(name):
            self.evaluated.update(zip(step.outputs, self._values(step), strict=True))
        return self.evaluated.get(name)

    def _before(self, name: str) -> list[DraftOp]:
        steps: dict[int, DraftOp] = {}
        todo = [name]
        while todo:
            value = todo.pop()
            step = self.producers.get(value)
            if step is not None and value not in self.evaluated and id(step) not in steps:
                steps[id(step)] = step
                todo += step.inputs()
        return [step for step in self.builder.steps if id(step) in steps] if steps else []

    def _values(self, step: DraftOp) -> Sequence[Tensor | None]:
        inputs = {name: self._tensor(name) for name in step.inputs()}
        large = not step.target.startswith("aten.expand") and any(
            math.prod(self.builder.infos[name].shape) > LARGEST_VALUE for name in step.outputs
        )
        if large or not is_pure(step) or step.place.autocast or any(x is None for x in inputs.values()):
            return [None] * len(step.outputs)
        try:
            return run_step(step, inputs)
        except (NotImplementedError, RuntimeError):  # not every op is there for every dtype on the CPU
            return [None] * len(step.outputs)

    def _tensor(self, name: str) -> Tensor | None:
        if name not in self.tensors:
            return self.evaluated.get(name)
        self.used.add(name)
        with _disable_current_modes():  # a graph has no devices, and may be promoted
            return self.tensors[name].detach().to("cpu", getattr(torch, self.builder.infos[name].dtype))


def run_step(step: DraftOp, inputs: Mapping[str, Any]) -> list[Tensor]:
    """A step run by torch, on tensors with values."""
    arguments = map_refs(step.arguments, lambda ref: inputs[ref.name])
    arguments = {name: _torch_argument(value) for name, value in arguments.items()}
    with _disable_current_modes(), torch.no_grad():
        result = torch_op(step.target)(**arguments)
    return list(result) if isinstance(result, tuple | list) else [result]


def _torch_argument(value: Any) -> Any:
    if isinstance(value, tuple):
        return [_torch_argument(inner) for inner in value]
    return getattr(torch, value) if isinstance(value, Dtype) else value

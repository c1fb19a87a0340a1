"""The graph of a model at global shape.

    Graph   = Input* Parameter* Buffer* Op* Output*
    Op      = outputs <- target(arguments)              arguments hold a Slot where a tensor goes
    Value   = name : dtype [shape], with a gradient or without

An op that decides by data (a branch, a loop) names the graphs that it runs, which the graph
holds as `branches`. They have inputs and outputs only.

A graph is functional: no op changes its input. Writes to buffers and parameters are outputs of the
graph (`Buffer.update`, `Parameter.update`). Names of ops are stable: the module path and the kind of op,
never a counter over the whole graph.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from .mask import MaskStructure
from .paths import prefixes

ITEM_SIZE = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1, "complex64": 8, "complex128": 16,
}  # fmt: skip


class Dtype(str):
    """A dtype as an argument of an op, by torch's name for it ("float32")."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of a tensor among an op's arguments: the op's input number `index`."""

    index: int


Argument = Any
"""None, bool, int, float, str, Dtype, Slot, or a tuple of these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    name: str
    shape: tuple[int, ...]
    dtype: str
    gradient: bool = False

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ITEM_SIZE.get(self.dtype, 4)

    @property
    def floating(self) -> bool:
        return self.dtype.startswith(("float", "bfloat", "complex"))

    def __str__(self) -> str:
        return f"{self.name} {self.dtype}{list(self.shape)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLine:
    """A line of the user's model."""

    file: str
    line: int
    code: str = ""

    def __str__(self) -> str:
        return f"{self.file.rsplit('/', 1)[-1]}:{self.line}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One call. `name` is "module.path / kind", unique in its graph."""

    name: str
    target: str  # "aten.linear.default"
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    arguments: tuple[tuple[str, Argument], ...] = ()
    source: SourceLine | None = None
    module_path: str = ""
    region: str | None = None  # the recompute region it is in: the user's (torch.utils.checkpoint), or the plan's
    autocast: str | None = None  # "cpu:bfloat16" inside an autocast region, else None
    no_grad: bool = False
    draws: bool = False  # random numbers
    mask: MaskStructure | None = None  # what the mask of attention means, if that is known

    def argument(self, name: str, default: Argument = None) -> Argument:
        for key, value in self.arguments:
            if key == name:
                return value
        return default

    def tensor(self, name: str) -> str | None:
        """The value given for a tensor argument, or None."""
        slot = self.argument(name)
        return self.inputs[slot.index] if isinstance(slot, Slot) else None

    def with_arguments(self, /, **changes: Argument) -> Op:
        known = dict(self.arguments)
        return replace(self, arguments=tuple({**known, **changes}.items()))

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        return f"{self.name} ({self.target}){at}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Input:
    """A tensor that the caller passes; `path` says where, such as "input_ids" or "args[0]['mask']"."""

    value: str
    path: str
    batched: bool = True  # whether its dim 0 is the batch, if it has the size of the graph's


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter under every key that the state dict has for it (tied weights have several).

    `update` is the value that forward leaves in it, if forward writes to it. It has no gradient.
    """

    value: str
    keys: tuple[str, ...]
    trainable: bool = True
    update: str | None = None

    @property
    def key(self) -> str:
        return self.keys[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class Buffer:
    """A buffer or a lifted constant; `update` is the value it has after the step, if it changes."""

    value: str
    key: str
    persistent: bool = True
    update: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """A leaf of what the model returns: a value, or a literal that is the same every time."""

    path: str
    value: str | None = None
    literal: Any = None
    number: bool = False  # a value without dims that is a number of Python to the caller


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A model for one entry ("train", "eval", ...), ops in an order in which they can run."""

    name: str
    entry: str
    values: Mapping[str, Value]
    inputs: tuple[Input, ...]
    parameters: tuple[Parameter, ...]
    buffers: tuple[Buffer, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Output, ...]
    batch: int | None = None  # the size of the batch dim (dim 0 of the inputs), if there is one
    notes: tuple[str, ...] = field(default=())
    branches: Mapping[str, Graph] = field(default_factory=dict)  # graphs that ops of this one run, by name
    local_statistics: bool = False  # batch norms in training take those of a rank's own samples
    classes: Mapping[str, str] = field(default_factory=dict)  # of the model's modules, by their paths
    returned: tuple[Output, ...] | None = None  # what the model gives back, where `outputs` leave some of it out

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", MappingProxyType(dict(self.values)))
        object.__setattr__(self, "branches", MappingProxyType(dict(self.branches)))
        object.__setattr__(self, "classes", MappingProxyType(dict(self.classes)))

    def is_batched(self, item: Input) -> bool:
        """Whether the dim 0 of an input is the batch."""
        shape = self.values[item.value].shape
        return item.batched and self.batch is not None and bool(shape) and shape[0] == self.batch

    @cached_property
    def producer(self) -> dict[str, Op]:
        return {name: op for op in self.ops for name in op.outputs}

    @cached_property
    def users(self) -> dict[str, tuple[tuple[Op, int], ...]]:
        """For each value the ops that read it, with the number of the input."""
        users: dict[str, list[tuple[Op, int]]] = {name: [] for name in self.values}
        for op in self.ops:
            for index, name in enumerate(op.inputs):
                users[name].append((op, index))
        return {name: tuple(uses) for name, uses in users.items()}

    @cached_property
    def under(self) -> dict[str, tuple[Op, ...]]:
        """For each module that has ops, and those that it is in, the ops at or under it."""
        ops: dict[str, list[Op]] = {}
        for op in self.ops:
            for path in prefixes(op.module_path):
                ops.setdefault(path, []).append(op)
        return {path: tuple(inside) for path, inside in ops.items()}

    @cached_property
    def by_name(self) -> dict[str, Op]:
        return {op.name: op for op in self.ops}

    def parameter_of(self, value: str) -> Parameter | None:
        return self._parameters.get(value)

    @cached_property
    def _parameters(self) -> dict[str, Parameter]:
        return {parameter.value: parameter for parameter in self.parameters}

    def sinks(self) -> Iterator[str]:
        """The values that must be computed: outputs and updates of buffers and parameters."""
        for output in self.outputs:
            if output.value is not None:
                yield output.value
        for _, update in self.updates():
            yield update

    def updates(self) -> Iterator[tuple[str, str]]:
        """(key, value that forward leaves in it) of the buffers and parameters that forward writes to."""
        for key, update in (*((b.key, b.update) for b in self.buffers), *((p.key, p.update) for p in self.parameters)):
            if update is not None:
                yield key, update

    @cached_property
    def fingerprint(self) -> str:
        """Twelve digits that change when the model changes, but not with the batch size.

        Sizes of activations stay out; names, kinds, edges and the shapes of parameters are in.
        """
        digest = hashlib.sha256()
        for parameter in self.parameters:
            value = self.values[parameter.value]
            digest.update(repr((parameter.keys, value.shape, value.dtype, parameter.trainable)).encode())
        number: dict[str, int] = {}
        for name in (
            *(i.value for i in self.inputs),
            *(p.value for p in self.parameters),
            *(b.value for b in self.buffers),
        ):
            number[name] = len(number)
        for op in self.ops:
            for name in op.outputs:
                number[name] = len(number)
            edges = [number[name] for name in op.inputs]
            digest.update(repr((op.name, op.target, edges, op.region, op.autocast, op.no_grad)).encode())
        outputs = self.outputs if self.returned is None else self.returned
        digest.update(repr([o.value and number[o.value] for o in outputs]).encode())
        for name, branch in self.branches.items():
            digest.update(f"{name} {branch.fingerprint}".encode())
        return digest.hexdigest()[:12]

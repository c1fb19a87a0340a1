"""Capture from end to end: trace, convert, clean up, name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.export.graph_signature import InputKind, InputSpec
from torch.utils import _pytree as pytree

from ..errors import CaptureError
from ..ir import Buffer, Graph, Input, Output, Parameter, check
from .aliases import Handle
from .captured import Captured, InputLeaf
from .convert import Conversion, Modes
from .draft import Draft, Fact
from .finish import drop_dead, identifier, join_repeats, ops_of, promote, value_names, values_of
from .schema import fact_of
from .signature import input_paths, output_paths
from .trace import Trace, trace


def capture(
    module: nn.Module,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    entry: str = "train",
    promote: bool = False,
    name: str | None = None,
) -> Captured:
    """The graph of one call of a module, at the shapes of the example arguments.

    Parameters and inputs may be real, fake or on meta; nothing is run or allocated, and the
    module is left as it was. With `promote` every float in the graph is a float64.
    """
    module = getattr(module, "_orig_mod", module)
    args, kwargs = tuple(args), dict(kwargs or {})
    traced = trace(module, args, kwargs)
    leaves = _Leaves(module, traced, Draft())
    conversion = Conversion(leaves.draft, traced.kept)
    paths = input_paths(module, args, kwargs)
    handles = leaves.placeholders(pytree.tree_leaves((args, kwargs)), paths)
    results = conversion.run(traced.program.graph_module, handles, Modes())
    return _assemble(module, traced, conversion, leaves, results, entry, promote, name, tuple(kwargs), (args, kwargs))


@dataclass(slots=True)
class _Leaves:
    """What the graph starts from: parameters, buffers, constants, inputs."""

    module: nn.Module
    traced: Trace
    draft: Draft
    parameters: dict[str, list[str]] = field(default_factory=dict)  # value -> keys
    trainable: dict[str, bool] = field(default_factory=dict)
    buffers: dict[str, Handle] = field(default_factory=dict)  # key -> handle
    buffer_start: dict[str, str] = field(default_factory=dict)  # key -> value at the start
    constants: dict[str, tuple[str, torch.Tensor]] = field(default_factory=dict)  # value -> key, tensor
    inputs: list[InputLeaf] = field(default_factory=list)
    wishes: dict[str, str] = field(default_factory=dict)

    def placeholders(self, given: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        """A handle or a literal for each placeholder of the exported program."""
        owned = self._module_tensors()
        user = iter(zip(given, paths, strict=True))
        found: list[Any] = []
        for spec in self.traced.program.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                found.append(self._input(*next(user)))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                found.append(owned[str(spec.target)])
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                found.append(self._constant(spec, owned))
            else:
                raise CaptureError(f"the model needs a {spec.kind.name.lower()} ({spec.target}), which a graph can't hold")
        return found

    def _module_tensors(self) -> dict[str, Handle]:
        """A handle under every key of the module, one for each tensor object."""
        handles: dict[int, Handle] = {}
        owned: dict[str, Handle] = {}
        for key, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in handles:
                handle = handles[id(parameter)] = Handle(self.draft.value(fact_of(parameter)))
                self.wishes[handle.name] = identifier(key)
                self.trainable[handle.name] = parameter.requires_grad
            owned[key] = handles[id(parameter)]
            self.parameters.setdefault(owned[key].name, []).append(key)
        for key, buffer in self.module.named_buffers(remove_duplicate=False):
            if id(buffer) not in handles:
                handle = handles[id(buffer)] = Handle(self.draft.value(fact_of(buffer)))
                self.wishes[handle.name] = identifier(key)
            owned[key] = handles[id(buffer)]
            self.buffers[key] = owned[key]
            self.buffer_start[key] = owned[key].name
        return owned

    def _constant(self, spec: InputSpec, owned: Mapping[str, Handle]) -> Handle:
        tensor = self.traced.program.constants[str(spec.target)]
        storage = tensor.untyped_storage()._cdata
        if storage in self.traced.stand_in.buffers:  # a buffer reached through .data
            return owned[self.traced.stand_in.buffers[storage]]
        handle = Handle(self.draft.value(fact_of(tensor)))
        self.wishes[handle.name] = identifier(str(spec.target))
        self.constants[handle.name] = (f"constant.{len(self.constants)}", tensor)
        return handle

    def _input(self, leaf: Any, path: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            self.inputs.append(InputLeaf(path=path, literal=leaf))
            return leaf
        fact = fact_of(leaf)
        handle = Handle(self.draft.value(fact))
        self.wishes[handle.name] = identifier(path)
        self.inputs.append(InputLeaf(path=path, value=handle.name, shape=fact.shape, dtype=fact.dtype))
        return handle


def _assemble(
    module: nn.Module, traced: Trace, conversion: Conversion, leaves: _Leaves, results: Any, entry: str,
    promoted: bool, name: str | None, keywords: tuple[str, ...], call: Any,
) -> Captured:  # fmt: skip
    draft = leaves.draft
    updates = {key: handle.read() for key, handle in leaves.buffers.items()}
    outputs = [held.read() if isinstance(held, Handle) else held for held in _user_results(traced, results)]
    made = [isinstance(held, Handle) for held in _user_results(traced, results)]
    if promoted:
        promote(draft)
    join_repeats(draft)
    ends = [held for held, tensor in zip(outputs, made, strict=True) if tensor] + list(updates.values())
    drop_dead(draft, [draft.now(held) for held in ends])
    names = value_names(draft, leaves.wishes)
    out_spec = traced.program.call_spec.out_spec
    assert out_spec is not None
    graph = Graph(
        name=name or type(module).__name__,
        entry=entry,
        values=values_of(draft, names),
        inputs=tuple(Input(value=names[leaf.value], path=leaf.path) for leaf in leaves.inputs if leaf.value),
        parameters=tuple(
            Parameter(value=names[value], keys=tuple(keys), trainable=leaves.trainable[value])
            for value, keys in leaves.parameters.items()
        ),
        buffers=_buffers(module, leaves, updates, names),
        ops=ops_of(draft, names),
        outputs=tuple(
            Output(path=path, value=names[draft.now(held)]) if tensor else Output(path=path, literal=held)
            for path, held, tensor in zip(output_paths(out_spec), outputs, made, strict=True)
        ),
        batch=_batch(leaves.inputs),
        notes=tuple(draft.notes),
    )
    constants = {names[value]: _as_promoted(tensor, promoted) for value, (_, tensor) in leaves.constants.items()}
    return Captured(
        graph=check(graph),
        in_spec=pytree.tree_structure(call),
        out_spec=out_spec,
        input_leaves=tuple(_renamed(leaf, names, draft) for leaf in leaves.inputs),
        constants=constants,
        functions={op.target: conversion.functions[op.target] for op in graph.ops if op.target in conversion.functions},
        keywords=keywords,
    )


def _user_results(traced: Trace, results: Any) -> list[Any]:
    leaves: list[Any] = []
    for held in results:
        leaves.append(held)
    return leaves


def _buffers(
    module: nn.Module, leaves: _Leaves, updates: Mapping[str, str], names: Mapping[str, str]
) -> tuple[Buffer, ...]:
    transient = {
        f"{path}.{key}" if path else key
        for path, held in module.named_modules(remove_duplicate=False)
        for key in held._non_persistent_buffers_set
    }
    found = []
    seen: set[str] = set()
    for key, start in leaves.buffer_start.items():
        if start in seen:
            continue
        seen.add(start)
        end = leaves.draft.now(updates[key])
        update = names[end] if end != start else None
        found.append(Buffer(value=names[start], key=key, persistent=key not in transient, update=update))
    for value, (key, _) in leaves.constants.items():
        found.append(Buffer(value=names[value], key=key, persistent=False))
    return tuple(found)


def _batch(inputs: Sequence[InputLeaf]) -> int | None:
    sizes = {leaf.shape[0] for leaf in inputs if leaf.value is not None and leaf.shape}
    return sizes.pop() if len(sizes) == 1 else None


def _as_promoted(tensor: torch.Tensor, promoted: bool) -> torch.Tensor:
    return tensor.double() if promoted and tensor.is_floating_point() else tensor


def _renamed(leaf: InputLeaf, names: Mapping[str, str], draft: Draft) -> InputLeaf:
    if leaf.value is None:
        return leaf
    fact: Fact = draft.facts[leaf.value]
    return InputLeaf(path=leaf.path, value=names[leaf.value], shape=fact.shape, dtype=fact.dtype)

"""What a graph starts from: parameters, buffers, constants and inputs, each tensor object once."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.export.graph_signature import InputKind, InputSpec
from torch.fx import Node

from ...errors import CaptureError
from ..captured import InputLeaf, MaskFacts
from ..failure import unsupported
from ..tracing.export import Trace
from ..tracing.foreign_parameters import is_foreign, refusal
from .aliases import AliasView, TensorHandle
from .canonical import AtenCall, write
from .graph_builder import GraphBuilder, OpOrigin, ValueRef, base_name
from .schema import value_info
from .source_lines import source_of
from .value_names import identifier

SAVE_NOTHING = ("aten.embedding.default", "aten.detach.default", "aten.sub.Tensor", "aten.add.Tensor")
"""Ops whose backward does not need the values of a parameter that they read."""


@dataclass(slots=True)
class Leaves:
    """What the graph starts from: parameters, buffers, constants, inputs."""

    module: nn.Module
    traced: Trace
    builder: GraphBuilder
    masks: MaskFacts
    parameters: dict[str, list[str]] = field(default_factory=dict)  # value -> keys
    trainable: dict[str, bool] = field(default_factory=dict)
    buffers: dict[str, TensorHandle] = field(default_factory=dict)  # key -> handle
    buffer_start: dict[str, str] = field(default_factory=dict)  # key -> value at the start
    constants: dict[str, torch.Tensor] = field(default_factory=dict)  # by value
    outside: dict[str, TensorHandle] = field(
        default_factory=dict
    )  # tensors that are no buffers, by what export calls them
    owned_parameters: dict[str, TensorHandle] = field(default_factory=dict)  # by key
    input_handles: list[TensorHandle] = field(default_factory=list)
    inputs: list[InputLeaf] = field(default_factory=list)
    options: dict[str, str] = field(default_factory=dict)
    padding: dict[str, int] = field(default_factory=dict)  # see `CapturedGraph`; by value
    fixed: set[str] = field(default_factory=set)  # of constants and buffers, those whose values the graph goes by

    def placeholders(self, arguments: Sequence[Any], paths: Sequence[str]) -> list[Any]:
        """A handle or a literal for each placeholder of the exported program."""
        owned = self._module_tensors()
        user = iter(zip(arguments, paths, strict=True))
        specs = self.traced.program.graph_signature.input_specs
        nodes = [node for node in self.traced.program.graph.nodes if node.op == "placeholder"]
        handles: list[Any] = [None] * len(specs)
        by_storage: dict[int, TensorHandle] = {}
        for index, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
            if spec.kind is InputKind.USER_INPUT:
                handles[index] = self._input(*next(user))
            elif spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
                handles[index] = owned[str(spec.target)]
            elif spec.kind is not InputKind.CONSTANT_TENSOR:
                kind = spec.kind.name.lower().replace("_", " ")
                raise CaptureError(f"the model has a {kind} ({spec.target}), which a graph can't represent")
            if isinstance(handles[index], TensorHandle):
                handles[index].storage = node.meta["val"].untyped_storage()._cdata
                by_storage[handles[index].storage] = handles[index]
        for index, (spec, node) in enumerate(zip(specs, nodes, strict=True)):
            if spec.kind is InputKind.CONSTANT_TENSOR:
                handles[index] = self._constant(spec, node, by_storage)
        return handles

    def known_values(self) -> dict[str, torch.Tensor]:
        """The values of constants, and of buffers that have some and that forward does not write to."""
        buffers = {
            handle.name: buffer
            for key, original in self.module.named_buffers(remove_duplicate=False)
            for handle, buffer in [(self.buffers[key], self.masks.buffers.get(key, original))]
            if handle.name == self.buffer_start[key] and not isinstance(buffer, FakeTensor) and not buffer.is_meta
        }
        return {**buffers, **self.constants}

    def parameter_updates(self) -> dict[str, str]:
        """What forward leaves in the parameters that it writes to, by their value at the start."""
        steps, updates = self.builder.steps, dict[str, str]()
        for start, keys in self.parameters.items():
            end = self.owned_parameters[keys[0]].read()
            if end != start:
                at = next((at for at, step in enumerate(steps) if end in step.outputs), None)
                place = OpOrigin() if at is None else steps[at].place
                arguments, info = {"self": ValueRef(end)}, self.builder.infos[end]
                updates[start] = self.builder.emit_one("aten.detach.default", arguments, info, place)
                if at is not None:  # next to what makes it, which decides in which pipeline stage it is
                    steps.insert(at + 1, steps.pop())
        return updates

    def check_writes(self) -> None:
        """Buffers and parameters may change in a step; others may not, and the caller is warned that theirs stay."""
        for key, handle in self.owned_parameters.items():
            self._check_earlier_reads(key, frozenset(handle.past))
        for key, handle in self.outside.items():
            if handle.version:
                name = "of a global or a list" if "lifted_tensor" in key else f"self.{key}"
                raise CaptureError(
                    f"the forward of {type(self.module).__name__} writes to the tensor {name}, which is no buffer: the "
                    "program would forget it after the call. Make it a buffer (register_buffer)"
                )
        for leaf, handle in zip([leaf for leaf in self.inputs if leaf.value], self.input_handles, strict=True):
            if handle.version:
                note = f"the model changes its argument {leaf.path} in place; the graph leaves it alone"
                self.builder.notes.append(note)
                warnings.warn(
                    f"{note}: the caller's tensor stays as it was. Change a copy ({leaf.path}.clone()), and return it "
                    "if it is read after the call",
                    stacklevel=2,
                )

    def _check_earlier_reads(self, key: str, past: frozenset[str]) -> None:
        """Backward must not need what a parameter was before it was written to: on one device it is gone by then."""
        for step in self.builder.steps if past else ():
            saves = step.target not in SAVE_NOTHING and any(self.builder.infos[name].gradient for name in step.outputs)
            if past.isdisjoint(step.inputs()) or not (saves or step.place.region):
                continue
            what = f"{base_name(step.target)} reads the parameter {key} before forward writes to it"
            if step.place.region:
                what = f"forward writes to the parameter {key}, and checkpointing reads it again after that"
            remedy = "Write to it in the training loop, or, if it is not trained, make it a buffer (register_buffer)."
            raise unsupported(what, step.place.source, remedy)

    def _module_tensors(self) -> dict[str, TensorHandle]:
        """A handle under every key of the module, one for each tensor object."""
        handles: dict[int, TensorHandle] = {}
        owned: dict[str, TensorHandle] = {}
        for key, parameter in self.module.named_parameters(remove_duplicate=False):
            if id(parameter) not in handles:
                handle = handles[id(parameter)] = TensorHandle(self.builder.value(value_info(parameter)))
                self.options[handle.name] = identifier(key)
                self.trainable[handle.name] = parameter.requires_grad
            owned[key] = self.owned_parameters[key] = handles[id(parameter)]
            self.parameters.setdefault(owned[key].name, []).append(key)
        for key, buffer in self.module.named_buffers(remove_duplicate=False):
            if id(buffer) not in handles:
                handle = handles[id(buffer)] = TensorHandle(self.builder.value(value_info(buffer)))
                self.options[handle.name] = identifier(key)
            owned[key] = handles[id(buffer)]
            self.buffers[key] = owned[key]
            self.buffer_start[key] = owned[key].name
        return owned

    def _constant(self, spec: InputSpec, node: Node, by_storage: Mapping[int, TensorHandle]) -> TensorHandle:
        tensor = self.traced.program.constants[str(spec.target)]
        lines = (source_of(user.meta.get("stack_trace")) for user in node.users)
        line = next((line for line in lines if line is not None), None)
        if tensor.layout != torch.strided:
            what = f"It reads a sparse tensor {list(tensor.shape)} of the model, which a program can't have"
            raise unsupported(what, line, "Keep it dense, or pass it to forward.")
        base = by_storage.get(tensor.untyped_storage()._cdata)
        if base is not None:
            return self._data_of(base)
        if is_foreign(tensor):
            raise refusal(tensor, line)
        if isinstance(tensor, FakeTensor):
            what = f"It reads a tensor {list(tensor.shape)} that has no values and is no parameter or buffer"
            remedy = "Register it as a buffer, or build the model on a real device."
            raise unsupported(what, line, remedy)
        handle = self.outside[str(spec.target)] = self.constant(tensor, str(spec.target))
        return handle

    def constant(self, tensor: torch.Tensor, name: str = "constant") -> TensorHandle:
        """A tensor that the model makes out of nothing."""
        handle = TensorHandle(self.builder.value(value_info(tensor)))
        self.options[handle.name] = identifier(name)
        self.constants[handle.name] = tensor
        return handle

    def _data_of(self, base: TensorHandle) -> TensorHandle:
        """What `tensor.data` is: the same memory, without gradient."""

        def take(parent: str) -> list[str]:
            arguments = {"self": ValueRef(parent)}
            info = self.builder.infos[parent]
            return write(AtenCall(self.builder, "aten.detach.default", arguments, [info], OpOrigin()))

        return TensorHandle(
            take(base.read())[0], base, AliasView(take, "aten.detach.default", {}), storage=base.storage
        )

    def _input(self, leaf: Any, path: str) -> Any:
        if not isinstance(leaf, torch.Tensor):
            self.inputs.append(InputLeaf(path=path, literal=leaf))
            return leaf
        info = value_info(leaf)
        handle = TensorHandle(self.builder.value(info))
        self.options[handle.name] = identifier(path)
        self.input_handles.append(handle)
        self.inputs.append(InputLeaf(path=path, value=handle.name, shape=info.shape, dtype=info.dtype))
        return handle

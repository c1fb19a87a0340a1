"""The stand-in for the user's model in a rehearsal: a module of random values, and the small graph of its call."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import CapturedGraph, OpaqueBody, OpaqueCall
from ..capture.user_calls.opaque_call import OpaqueOutput, runner
from ..errors import NonFiniteError
from ..ir import Graph, Op
from ..ops.user_calls import OPAQUE
from ..verify.run import MakeOptimizer, VerifyTask, loss_of
from .draws import buffer, graph_input, module_of
from .layers import Rename
from .shrink import expect, run_fitting


@dataclass(frozen=True, kw_only=True)
class SmallCall:
    """Derives the call of the small graph from the real one.

    module    the user's, for opaque submodules and for buffers that have values
    leaves    the arguments of the real call, in the order of `captured.input_leaves`
    rename    maps the path of a submodule to its path with fewer layers
    """

    captured: CapturedGraph
    module: nn.Module
    leaves: tuple[Any, ...]
    rename: Rename
    seed: int

    def task(self, graph: Graph, optimizer: MakeOptimizer, steps: int) -> VerifyTask:
        """The training of the small graph."""
        args, kwargs = pytree.tree_unflatten(self._arguments(graph), self.captured.in_spec)
        return VerifyTask(
            module=self._module(graph), args=args, kwargs=kwargs, optimizer=optimizer, loss=loss_of, steps=steps,
            entries=("train",), seed=self.seed,
        )  # fmt: skip

    def call(self, graph: Graph, module: nn.Module) -> CapturedGraph:
        """The small graph as if it had been captured from the small module."""
        opaques = self._opaques(graph)
        functions = dict(self.captured.functions)
        if OPAQUE in functions:
            bodies = {
                call.path: OpaqueBody(copy.deepcopy(module.get_submodule(call.path))) for call in opaques.values()
            }
            functions[OPAQUE] = replace(functions[OPAQUE], call=runner(opaques, module, bodies))
        leaves = tuple(
            leaf
            if leaf.value is None
            else replace(leaf, shape=graph.values[leaf.value].shape, dtype=graph.values[leaf.value].dtype)
            for leaf in self.captured.input_leaves
        )
        return replace(
            self.captured, graph=graph, functions=functions, opaques=opaques, input_leaves=leaves,
            constants=self._constants(graph),
        )  # fmt: skip

    def attempt(self, graph: Graph) -> None:
        """Run the small graph forward once; raises Unfit for an op that rejects its values."""
        module = self._module(graph)
        call = self.call(graph, module)
        tensors = [leaf for leaf in self._arguments(graph) if isinstance(leaf, Tensor)]
        values: dict[str, Tensor] = dict(zip((source.value for source in graph.inputs), tensors, strict=True))
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = dict(module.named_buffers(remove_duplicate=False))
        values |= {parameter.value: parameters[parameter.key].detach() for parameter in graph.parameters}
        for state in graph.buffers:
            known = call.constants.get(state.value)
            values[state.value] = buffers[state.key] if known is None else known
        doubtful: Op | None = None  # uninitialized memory may contain anything
        for op in graph.ops:
            outputs = run_fitting(op, [values[name] for name in op.inputs], call.functions)
            expect(op, graph, outputs)
            values.update(zip(op.outputs, outputs, strict=True))
            if doubtful is None and any(bool(output.isnan().any()) for output in outputs):
                doubtful = op
        results = (values[output.value] for output in graph.outputs if output.value is not None)
        if doubtful is not None and not all(bool(result.isfinite().all()) for result in results):
            raise _not_finite(doubtful)

    def _module(self, graph: Graph) -> nn.Module:
        paths = {call.path: before for call, before in self._kept_calls(graph)}
        return module_of(graph, self.module, paths, self.captured.constants, self.seed)

    def _kept_calls(self, graph: Graph) -> list[tuple[OpaqueCall, str]]:
        """The calls of opaque submodules, with their path in the user's model."""
        there = {op.argument("op_key") for op in graph.ops if op.target == OPAQUE}
        calls: list[tuple[OpaqueCall, str]] = []
        for old, call in self.captured.opaques.items():
            key, path = self.rename(old), self.rename(call.path)
            if key is not None and path is not None and key in there:
                calls.append((replace(call, key=key, path=path), call.path))
        return calls

    def _opaques(self, graph: Graph) -> dict[str, OpaqueCall]:
        """The same calls, with the output shapes of the small graph."""
        outputs = {op.argument("op_key"): op.outputs for op in graph.ops if op.target == OPAQUE}
        calls: dict[str, OpaqueCall] = {}
        for call, _ in self._kept_calls(graph):
            pairs = zip((graph.values[name] for name in outputs[call.key]), call.outputs, strict=True)
            shapes = tuple(OpaqueOutput(value.shape, getattr(torch, value.dtype), old.gradient) for value, old in pairs)
            calls[call.key] = replace(call, outputs=shapes)
        return calls

    def _constants(self, graph: Graph) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        constants = self.captured.constants
        return {
            state.value: buffer(graph.values[state.value], constants[state.value], generator)
            for state in graph.buffers
            if state.value in constants
        }

    def _arguments(self, graph: Graph) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        arguments: list[Any] = []
        for leaf, known in zip(self.captured.input_leaves, self.leaves, strict=True):
            if leaf.value is None:
                arguments.append(leaf.literal)
                continue
            tensor = graph_input(graph, graph.values[leaf.value], known, generator)
            arguments.append(tensor.requires_grad_(isinstance(known, Tensor) and known.requires_grad))
        return arguments


def _not_finite(op: Op) -> NonFiniteError:
    return NonFiniteError(
        f"{op} returns non-finite values for the random inputs of a rehearsal, which can't be compared; "
        "pass an example with valid values"
    )

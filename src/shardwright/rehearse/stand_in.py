"""What stands for the user's model in a rehearsal: a module of random values, and the small graph of its call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..capture import Body, Captured, Opaque
from ..capture.part import Made, runner
from ..errors import NonFiniteError
from ..ir import Graph, Op
from ..rules.kept import OPAQUE
from ..verify.run import MakeOptimizer, Task, loss_of
from .draws import buffer, graph_input, module_of
from .shrink import expect, run_fitting


@dataclass(frozen=True, kw_only=True)
class StandIn:
    """Makes the call of the small graph out of the call of the real one.

    module    the user's, for the submodules that stay as they are and for buffers that have values
    leaves    the arguments of the real call, in the order of `captured.input_leaves`
    rename    from the path of a submodule to what it is called with fewer layers
    """

    captured: Captured
    module: nn.Module
    leaves: tuple[Any, ...]
    rename: Callable[[str], str]
    seed: int

    def task(self, graph: Graph, optimizer: MakeOptimizer, steps: int) -> Task:
        """The training of the small graph."""
        args, kwargs = pytree.tree_unflatten(self._arguments(graph), self.captured.in_spec)
        return Task(
            module=self._module(graph), args=args, kwargs=kwargs, optimizer=optimizer, loss=loss_of, steps=steps,
            entries=("train",), seed=self.seed,
        )  # fmt: skip

    def call(self, graph: Graph, module: nn.Module) -> Captured:
        """The small graph as if it had been captured from the small module."""
        opaques = self._opaques(graph)
        functions = dict(self.captured.functions)
        if OPAQUE in functions:
            bodies = {call.path: Body(copy.deepcopy(module.get_submodule(call.path))) for call in opaques.values()}
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
        """Run the small graph forward once; Unfit for an op that its values don't suit."""
        module = self._module(graph)
        call = self.call(graph, module)
        tensors = [held for held in self._arguments(graph) if isinstance(held, Tensor)]
        values: dict[str, Tensor] = dict(zip((held.value for held in graph.inputs), tensors, strict=True))
        parameters, buffers = dict(module.named_parameters(remove_duplicate=False)), dict(module.named_buffers())
        values |= {held.value: parameters[held.key].detach() for held in graph.parameters}
        for held in graph.buffers:
            known = call.constants.get(held.value)
            values[held.value] = buffers[held.key] if known is None else known
        doubtful: Op | None = None  # memory that is not filled yet may hold anything
        for op in graph.ops:
            made = run_fitting(op, [values[name] for name in op.inputs], call.functions)
            expect(op, graph, made)
            values.update(zip(op.outputs, made, strict=True))
            if doubtful is None and any(held.is_floating_point() and bool(held.isnan().any()) for held in made):
                doubtful = op
        results = (values[held.value] for held in graph.outputs if held.value is not None)
        if doubtful is not None and not all(bool(held.isfinite().all()) for held in results):
            raise _not_finite(doubtful)

    def _module(self, graph: Graph) -> nn.Module:
        paths = {held.path: before for held, before in self._kept_calls(graph)}
        return module_of(graph, self.module, paths, self.captured.constants, self.seed)

    def _kept_calls(self, graph: Graph) -> list[tuple[Opaque, str]]:
        """The calls of submodules that stay as they are, with their path in the user's model."""
        there = {op.argument("op_key") for op in graph.ops if op.target == OPAQUE}
        calls = ((self.rename(key), call) for key, call in self.captured.opaques.items())
        found: dict[str, tuple[Opaque, str]] = {}
        for key, call in calls:
            if key in there:
                found.setdefault(key, (replace(call, key=key, path=self.rename(call.path)), call.path))
        return list(found.values())

    def _opaques(self, graph: Graph) -> dict[str, Opaque]:
        shapes = {op.argument("op_key"): op.outputs for op in graph.ops if op.target == OPAQUE}
        found: dict[str, Opaque] = {}
        for call, _ in self._kept_calls(graph):
            values = [graph.values[name] for name in shapes[call.key]]
            pairs = zip(values, call.made, strict=True)
            made = tuple(Made(value.shape, getattr(torch, value.dtype), old.gradient) for value, old in pairs)
            found[call.key] = replace(call, made=made)
        return found

    def _constants(self, graph: Graph) -> Mapping[str, Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        constants = self.captured.constants
        return {
            held.value: buffer(graph.values[held.value], constants[held.value], generator)
            for held in graph.buffers
            if held.value in constants
        }

    def _arguments(self, graph: Graph) -> list[Any]:
        generator = torch.Generator().manual_seed(self.seed + 1)
        found: list[Any] = []
        for leaf, known in zip(self.captured.input_leaves, self.leaves, strict=True):
            if leaf.value is None:
                found.append(leaf.literal)
                continue
            value = graph.values[leaf.value]
            made = graph_input(graph, value, known, generator)
            found.append(made.requires_grad_(isinstance(known, Tensor) and known.requires_grad))
        return found


def _not_finite(op: Op) -> NonFiniteError:
    return NonFiniteError(
        f"{op} gives numbers that are not finite with the random values of a rehearsal, which can't be compared; "
        "pass an example with values that it can take"
    )

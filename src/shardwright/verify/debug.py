"""Debug mode: every value with its layout and its hash on every rank, and the first one that is wrong.

The original's graph and the program both run op by op. Every value of the program is gathered
according to its layout and compared with the graph's value of the same name, in the order of
computation; if all agree, gradients follow in the order of backward:

    the gradient of a value      wrong here: a reshard between its producer and its uses
    the gradient of a use        wrong here: the backward of the op that reads it

If this finds nothing and `verify` fails, the program is right, and the fault is in the generated
file or in the sync of parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor, nn

from ..errors import InputError
from ..ir import Op
from ..layout import Layout
from ..lower.program import graph_value
from ..plan.request import PlanLike, PlanRequest, read_source
from ..runtime.algorithms.random import Randomness
from ..runtime.model.inputs import digest
from .execute import ObservedValues, ProgramInterpreter, step_through, unshard_tensor
from .measure import TOLERANCE, deviation, largest, render
from .original import with_masks
from .parity import make_task, ranks_of, source_for
from .program import Compilation, compile_program
from .ranks import run_threads
from .run import Loss, VerifyTask, loss_of

Phase = Literal["forward", "backward"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedValue:
    """One value of the program, or its gradient, over all ranks, compared with the original's."""

    phase: Phase
    op: str  # "module.path / kind"; for gradients the op whose backward computed it
    source: str
    value: str  # "x: float64[4, 16]"
    layout: str
    hashes: tuple[str, ...]  # of each rank's shard
    deviation: float
    allowed: float

    @property
    def passed(self) -> bool:
        return self.deviation <= self.allowed

    def __str__(self) -> str:
        at = f" at {self.source}" if self.source else ""
        what = "" if self.phase == "forward" else "the gradient of "
        return (
            f"{self.op}{at}: {what}{self.value}, with layout {self.layout}, is off by {self.deviation:.2e}, where "
            f"{self.allowed:.2e} is allowed; hashes by rank: {' '.join(self.hashes)}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueTrace:
    """Every compared value, in order. Prints as a table."""

    title: str
    rows: tuple[ComparedValue, ...]

    @property
    def first(self) -> ComparedValue | None:
        """The first value that differs from the original."""
        return next((row for row in self.rows if not row.passed), None)

    def __rich__(self) -> Table:
        table = Table(title=self.title, title_justify="left")
        for name in ("", "op", "at", "value", "layout", "hash on each rank", "deviation"):
            table.add_column(name, overflow="fold")
        for row in self.rows:
            style = "" if row.passed else "red"
            cells = (row.phase, row.op, row.source, row.value, row.layout, " ".join(row.hashes), f"{row.deviation:.1e}")
            table.add_row(*(Text(cell, style=style) for cell in cells))
        return table

    def __str__(self) -> str:
        return render(self, width=200)


def trace(
    model: nn.Module,
    plan: PlanLike = "auto",
    *,
    example: Any,
    loss: Loss | None = None,
    dtype: torch.dtype = torch.float64,
    tolerance: float | None = None,
    ranks: int | None = None,
    seed: int = 0,
    timeout: float = 600.0,
) -> ValueTrace:
    """Run the original and the program op by op, ranks as threads, and compare every value and every gradient."""
    task = make_task(model, example, dtype, torch.device("cpu"), loss=loss or loss_of, steps=1, seed=seed)
    task.module.train(model.training)
    source = read_source(plan)
    count = ranks or ranks_of(source)
    request = PlanRequest(source=source_for(model, example, source, task))
    compilation = compile_program(task.module, task.args, task.kwargs, request, count, promote=task.promote)
    if compilation.plan.is_pipeline:
        raise InputError(
            f"{compilation.plan.policy} runs by a schedule; only plans without stages and microbatches can be "
            "compared op by op; start with a plan without a pipeline, such as tp=2"
        )
    original = _original(task, compilation)
    every = run_threads(count, _on_rank, task, compilation, timeout=timeout)
    limit = TOLERANCE.get(task.dtype, 1e-2) if tolerance is None else tolerance
    comparison = _Comparison(compilation, original, every, limit)
    title = f"{type(model).__name__} under {compilation.plan.policy}, op by op on {count} ranks"
    return ValueTrace(title=title, rows=(*comparison.forward(), *comparison.backward()))


def first_difference(
    model: nn.Module, plan: PlanLike = "auto", *, example: Any, **options: Any
) -> ComparedValue | None:
    """The first op at which the program differs from the original, or None. Takes the options of `trace`."""
    return trace(model, plan, example=example, **options).first


def _random(task: VerifyTask) -> Randomness:
    random = Randomness(seed=task.seed, exact=True)
    random.advance()
    return random


def _original(task: VerifyTask, compilation: Compilation) -> ObservedValues:
    """Run the graph op by op, at global shapes."""
    from ..capture.interpret import run_op

    captured, module = compilation.captured, task.module
    graph, functions = with_masks(captured, _random(task))
    start = dict(
        zip((graph_input.value for graph_input in graph.inputs), captured.flatten(task.args, task.kwargs), strict=True)
    )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for parameter in graph.parameters:
        start[parameter.value] = parameters[parameter.key].detach().clone().requires_grad_(parameter.trainable)
    buffers = dict(module.named_buffers(remove_duplicate=False))
    for buffer in graph.buffers:
        constant = captured.constants.get(buffer.value)
        start[buffer.value] = buffers[buffer.key] if constant is None else constant
    known = {**captured.functions, **functions}
    watched = step_through(graph.ops, start, lambda op, tensors: run_op(op, tensors, known))
    outputs = [None if output.value is None else watched.values[output.value] for output in graph.outputs]
    _backward(task, captured.unflatten(outputs))
    return watched


def _on_rank(rank: int, task: VerifyTask, compilation: Compilation) -> ObservedValues:
    module = task.module
    executor = ProgramInterpreter(compilation.program, compilation.captured, _random(task), torch.device("cpu"))
    parameters = dict(module.named_parameters(remove_duplicate=False))
    buffers = dict(module.named_buffers(remove_duplicate=False))
    watched = executor.run(compilation.captured.flatten(task.args, task.kwargs), parameters, buffers)
    _backward(task, executor.outputs(watched))
    return watched


def _backward(task: VerifyTask, output: Any) -> None:
    loss = task.loss(output)
    if loss.requires_grad:
        loss.backward()  # type: ignore[no-untyped-call]


class _Comparison:
    """Compares the original's values and gradients with those of every rank."""

    def __init__(
        self, compilation: Compilation, original: ObservedValues, every: Sequence[ObservedValues], tolerance: float
    ) -> None:
        self.program, self.graph = compilation.program, compilation.captured.graph
        self.original, self.every, self.tolerance = original, every, tolerance
        gradients = (original.values[parameter.value].grad for parameter in self.graph.parameters)
        self.scale = largest(gradients)

    def forward(self) -> Iterator[ComparedValue]:
        for op in self.program.ops:
            for name in op.outputs:
                if name.endswith("@sum") or name.startswith("count@"):  # these have no counterpart
                    continue
                expected = self.original.values[graph_value(name)]
                inputs = [self.original.values[graph_value(x)] for x in op.inputs if not x.startswith("count@")]
                scale = largest(x for x in inputs if x.is_floating_point())
                shards = [watched.values.get(name) for watched in self.every]
                yield self._seen("forward", op, name, self.program.layouts[name], shards, expected, scale)

    def backward(self) -> Iterator[ComparedValue]:
        for op in reversed(self.program.body):
            if op.target.startswith("comm."):
                continue
            for name in op.outputs:
                if name in self.original.values:
                    yield from self._of_value(name, op)
            seen: dict[str, int] = {}
            for name in op.inputs:
                base = graph_value(name)
                use = (op.name, base, seen.get(base, 0))
                seen[base] = use[2] + 1
                if use in self.original.uses and self.original.uses[use].requires_grad:
                    shards = [watched.uses[use].grad for watched in self.every]
                    layout, expected = self.program.layouts[name].gradient(), self.original.uses[use].grad
                    yield self._seen("backward", op, name, layout, shards, expected, self.scale)
        for holding in self.program.parameters:
            if holding.trainable:
                yield from self._of_value(holding.value, None)

    def _of_value(self, name: str, producer: Op | None) -> Iterator[ComparedValue]:
        """The global gradient of a value, summed over all its uses, through their reshards."""
        if not self.original.values[name].requires_grad:
            return
        reshards = [
            op for op in self.program.body if op.target.startswith("comm.") and graph_value(op.inputs[0]) == name
        ]
        near = reshards[0] if reshards else producer
        shards = [watched.values[name].grad for watched in self.every]
        layout = self.program.layouts[name].gradient()
        yield self._seen("backward", near, name, layout, shards, self.original.values[name].grad, self.scale)

    def _seen(
        self, phase: Phase, op: Op | None, name: str, layout: Layout, shards: Sequence[Tensor | None],
        expected: Tensor | None, scale: float,
    ) -> ComparedValue:  # fmt: skip
        value = self.graph.values[graph_value(name)]
        return ComparedValue(
            phase=phase, op=op.name if op else f"parameter {name}", source=self._source(op),
            value=f"{name}: {value.dtype}{list(value.shape)}", layout=str(layout),
            hashes=tuple("-" if x is None else f"{digest([x]) & 0xFFFFFF:06x}" for x in shards),
            deviation=self._deviation(shards, layout, value.shape, expected),
            allowed=self.tolerance * (largest([expected]) + scale),
        )  # fmt: skip

    def _source(self, op: Op | None) -> str:
        """The user's line; a reshard has that of the op that it precedes."""
        if op is not None and op.source is None and " < " in op.name:
            op = self.graph.by_name.get(op.name.split(" < ")[0], op)
        return str(op.source) if op is not None and op.source else ""

    def _deviation(
        self, shards: Sequence[Tensor | None], layout: Layout, shape: Sequence[int], expected: Tensor | None
    ) -> float:
        present = next((x for x in shards if x is not None), None)
        if present is None:
            return deviation(None, expected)
        filled = [self._zeros(present, layout, shape, rank) if x is None else x for rank, x in enumerate(shards)]
        copies = unshard_tensor(filled, layout, shape, self.program)
        return float("inf") if copies is None else max(deviation(copy, expected) for copy in copies)

    def _zeros(self, like: Tensor, layout: Layout, shape: Sequence[int], rank: int) -> Tensor:
        mesh = self.program.mesh
        return like.new_zeros(layout.local_shape(shape, mesh.sizes, mesh.coordinates(mesh.devices[rank])))

"""Is a split what the rule says it is? Run the op on shards, recombine the results, compare with the global op.

For one op and one role the signature gives layouts. Every rank gets its shards of the inputs and runs
the op with the local sizes of lower.local. The outputs must have the layouts of the signature, and
the gradients the gradient layouts of the inputs. The ranks are a loop: ops whose shards communicate
(algorithms) can't be checked here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..capture.interpret import run_op
from ..errors import RuleError
from ..ir import Op
from ..layout import Axis, Layout, Mesh, Partial
from ..lower import LoweredProgram, Size
from ..lower.local import localize
from ..rules import Analysis

AXIS = "tp"
TOLERANCE = {torch.float64: 1e-9, torch.complex128: 1e-9}

Run = Callable[[Op, Sequence[Tensor]], Sequence[Tensor]]
"""Runs an op on tensors."""


class WrongSplit(RuleError):
    """A split that does not recombine; `details` says which and how, without naming the op."""

    def __init__(self, message: str, details: str) -> None:
        super().__init__(message)
        self.details = details


class NothingProven(RuleError):
    """A split whose inputs can't show whether it is right: every NaN looks like the others."""


def run_plain(op: Op, inputs: Sequence[Tensor]) -> Sequence[Tensor]:
    return run_op(op, inputs, {})


def differentiable(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def informative(x: Tensor) -> bool:
    """Whether other values could be told from it: without a finite element, any NaN passes for it."""
    return not differentiable(x) or not x.numel() or bool(torch.isfinite(x.detach()).any())


def mesh_of(parts: int) -> Mesh:
    return Mesh(axes=(Axis(name=AXIS, size=parts),))


def parts_of(units: int) -> tuple[int, ...]:
    """The numbers of shards to test `units` units with: 2 and 3, no shard empty (4 for 3)."""
    return tuple(parts for parts in (2, 3, 4) if (parts - 1) * -(-units // parts) < units)[:2]


def check_role(
    analysis: Analysis, op: Op, role: str, parts: int, inputs: Sequence[Tensor], run: Run = run_plain
) -> bool:
    """Raise a WrongSplit unless it is right; False if an algorithm does it, which has its own tests.

    If a result or a gradient has no finite element with these inputs, nothing is proven: raise NothingProven.
    `inputs` are the global inputs. `role` is a choice of the op's signature: a role, or "partial:1".
    """
    trial = SplitTrial(analysis, op, role, parts, inputs, run)
    if trial.communicates:
        return False
    trial.judge([trial.rank(index, run) for index in range(parts)])
    return True


Outcome = tuple[list[Tensor], list[Tensor | None]]
"""The outputs of one rank, and the gradients of its inputs."""


class SplitTrial:
    """One split of one op: its global outputs, what every rank computes from its shards, and whether they agree."""

    def __init__(
        self, analysis: Analysis, op: Op, role: str, parts: int, inputs: Sequence[Tensor], run: Run = run_plain
    ) -> None:
        self.op, self.mesh = op, mesh_of(parts)
        self.program, self.here = local_op(analysis, op, role, self.mesh)
        self.label = f"split on {role} over {parts}"
        self.inputs = [x.detach() for x in inputs]
        values = analysis.graph.values
        self.wants = [
            values[name].gradient and differentiable(x) and not op.no_grad
            for x, name in zip(inputs, op.inputs, strict=True)
        ]
        leaves = [x.clone().requires_grad_(want) for x, want in zip(self.inputs, self.wants, strict=True)]
        self.expected = run(op, leaves)
        self.back = [torch.randn_like(x) if differentiable(x) else None for x in self.expected]
        self.wanted = backward(self.expected, self.back, leaves)

    @property
    def communicates(self) -> bool:
        """Whether the ranks communicate (an algorithm does the split)."""
        return any(local.target.startswith("runtime.") for local in self.program.body)

    def rank(self, index: int, run: Run) -> Outcome:
        """Run one rank."""
        layouts = self.program.layouts
        pairs = zip(self.inputs, self.here.inputs, self.wants, strict=True)
        local = [local_value(x, layouts[name], self.mesh, index).requires_grad_(want) for x, name, want in pairs]
        try:
            values = _run(self.program, dict(zip(self.here.inputs, local, strict=True)), self.mesh, index, run)
        except Exception as error:
            shapes = ", ".join(str(list(x.shape)) for x in local)
            raise self.wrong(f"it does not run on shards {shapes}: {str(error).splitlines()[0]}") from error
        outputs = [values[name] for name in self.op.outputs]
        back = [
            None if g is None else local_value(g, layouts[name].gradient(), self.mesh, index)
            for g, name in zip(self.back, self.op.outputs, strict=True)
        ]
        try:
            return outputs, backward(outputs, back, local)
        except RuntimeError as error:
            raise self.wrong(f"its backward does not run on shards: {str(error).splitlines()[0]}") from error

    def judge(self, ranks: Sequence[Outcome]) -> None:
        """Raise a WrongSplit if the ranks' outputs don't recombine to the global ones, NothingProven if none could."""
        layouts = self.program.layouts
        for at, name in enumerate(self.op.outputs):
            off = apart([outputs[at] for outputs, _ in ranks], self.expected[at], layouts[name], self.mesh)
            if off:
                raise self.wrong(f"{'the result' if len(self.op.outputs) == 1 else f'result {at + 1}'} {off}")
        for at, name in enumerate(self.here.inputs):
            gradient = self.wanted[at]
            if gradient is not None:
                off = apart([gradients[at] for _, gradients in ranks], gradient, layouts[name].gradient(), self.mesh)
                if off:
                    raise self.wrong(f"the gradient of input {at + 1} {off}")
        named = [(f"result {at}", x) for at, x in enumerate(self.expected, 1)]
        named += [(f"the gradient of input {at}", x) for at, x in enumerate(self.wanted, 1) if x is not None]
        empty = [name for name, x in named if not informative(x)]
        if empty:
            raise NothingProven(
                f"{self.op}: {' and '.join(empty)} of the global op has no finite element with these inputs, which "
                "can't show whether a split is right"
            )

    def wrong(self, fault: str) -> WrongSplit:
        return WrongSplit(f"{self.op} {self.label}: {fault}", f"{self.label} {fault}")


def local_op(analysis: Analysis, op: Op, role: str, mesh: Mesh) -> tuple[LoweredProgram, Op]:
    """A program of this op alone, with the layouts of the role."""
    inputs, outputs = analysis.signatures[op.name].layouts({AXIS: role}, mesh)
    names = tuple(f"{name}@use{at}" for at, name in enumerate(op.inputs))  # one value may be read in two layouts
    values, layouts = dict(analysis.graph.values), {}
    for name, origin, layout in zip((*names, *op.outputs), (*op.inputs, *op.outputs), (*inputs, *outputs), strict=True):
        values[name] = replace(analysis.graph.values[origin], name=name)
        layouts[name] = layout
    renamed = replace(op, inputs=names)
    program = LoweredProgram(
        graph=analysis.graph, analysis=analysis, mesh=mesh, plan_name="", plan_policy="", values=values,
        layouts=layouts, parameters=(), body=(renamed,), choices={op.name: {AXIS: role}},
    )  # fmt: skip
    return localize(program), renamed


def _run(program: LoweredProgram, values: dict[str, Tensor], mesh: Mesh, index: int, run: Run) -> Mapping[str, Tensor]:
    for op in program.body:
        arguments = tuple((name, _numbers(value, mesh, index)) for name, value in op.arguments)
        outputs = run(replace(op, arguments=arguments), [values[name] for name in op.inputs])
        values.update(zip(op.outputs, outputs, strict=True))
    return values


def _numbers(value: Any, mesh: Mesh, index: int) -> Any:
    if isinstance(value, Size):
        return value.local(mesh.sizes, {AXIS: index})
    return tuple(_numbers(item, mesh, index) for item in value) if isinstance(value, tuple) else value


def local_value(x: Tensor, layout: Layout, mesh: Mesh, index: int) -> Tensor:
    """A rank's shard of a tensor; a pending sum enters as random terms that add up to it."""
    x = local_shard(x, layout, mesh, index).clone()
    if not isinstance(layout.placement(AXIS), Partial):
        return x
    if not differentiable(x):  # integers stay integers
        return x * (mesh.size if index == 0 else -1)
    return x * (2.0 if index == 0 else -1.0 / (mesh.size - 1))


def local_shard(x: Tensor, layout: Layout, mesh: Mesh, index: int) -> Tensor:
    split = layout.shard_of(AXIS)
    if split is None:
        return x
    dim, how = split
    runs = [x.narrow(dim, start, length) for start, length in how.spans(mesh.size, index)]
    return runs[0] if len(runs) == 1 else torch.cat(runs, dim) if runs else x.narrow(dim, 0, 0)


def backward(
    outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """The gradient of every input, None if it has none."""
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad and g is not None]
    needed = [x for x in inputs if x.requires_grad]
    if not pairs or not needed:
        return [None] * len(inputs)
    gradients_of = torch.autograd.grad([y for y, _ in pairs], needed, [g for _, g in pairs], allow_unused=True)
    dense = iter([g.to_dense() if g is not None and g.is_sparse else g for g in gradients_of])
    return [next(dense) if x.requires_grad else None for x in inputs]


def apart(shards: Sequence[Tensor | None], expected: Tensor, layout: Layout, mesh: Mesh) -> str:
    """How the shards of all ranks differ from the global tensor under a layout; empty if they agree."""
    missing = [str(index) for index, mine in enumerate(shards) if mine is None]
    if missing:
        return f"is missing on rank {missing[0]}"
    mine = [x for x in shards if x is not None]
    placement = layout.placement(AXIS)
    if isinstance(placement, Partial):
        if len({x.shape for x in mine}) > 1:
            return f"has shapes {', '.join(str(list(x.shape)) for x in mine)}, which can't be added"
        mine = [_reduce(mine, placement.op)]
    for index, x in enumerate(mine):
        theirs = local_shard(expected, layout, mesh, index)
        if x.shape != theirs.shape:
            return f"has shape {list(x.shape)} on rank {index}, not {list(theirs.shape)}"
        off = difference(x, theirs)
        if off:
            return off
    return ""


def _reduce(shards: Sequence[Tensor], op: str) -> Tensor:
    stacked = torch.stack([_comparable(x) for x in shards])
    return stacked.sum(0) if op == "sum" else stacked.amax(0) if op == "max" else stacked.amin(0)


_WIDER = {
    torch.complex32: torch.complex64, torch.uint16: torch.int64, torch.uint32: torch.int64, torch.uint64: torch.int64,
}  # fmt: skip


def _comparable(x: Tensor) -> Tensor:
    """The same values in a dtype that supports addition and comparison, which not all dtypes do."""
    return x.to(_WIDER[x.dtype]) if x.dtype in _WIDER else x


def difference(mine: Tensor, theirs: Tensor) -> str:
    """How two tensors of one shape differ; empty if they are equal."""
    mine, theirs = _comparable(mine.detach()), _comparable(theirs.detach())
    if not theirs.numel() or torch.equal(mine, theirs):
        return ""
    if not theirs.dtype.is_floating_point and not theirs.dtype.is_complex:
        return "has other values"
    finite = torch.isfinite(theirs)
    if not finite.all():
        if not torch.equal(torch.isfinite(mine), finite):
            return "is infinite in other places"
        mine, theirs = mine[finite], theirs[finite]
    off = float((mine - theirs).abs().sum() / (1 + theirs.abs().sum()))
    return "" if off < TOLERANCE.get(theirs.dtype, 1e-4) else f"is off by {off:.2g}"

"""Is a split what the rule says it is? Run the op on pieces, put the results together, compare with the whole.

For one op and one choice {axis: role} the signature gives layouts. Every rank gets its pieces of
the inputs, runs the op with the local sizes of lower.local, and what comes out must lie in the
layouts of the outputs; the gradients that come back must lie in the gradient layouts of the inputs.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shardwright.capture import capture
from shardwright.capture.interpret import run, run_op
from shardwright.ir import Op
from shardwright.layout import Axis, Layout, Mesh, Partial, piece_of
from shardwright.lower import Program, Size
from shardwright.lower.local import localize
from shardwright.rules import Analysis, analyse

Observed = dict[str, tuple[tuple[Tensor, ...], tuple[Tensor, ...]]]


def observe(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
) -> tuple[Analysis, Observed]:
    """A module's graph analysed, and for every op what went in and came out."""
    captured = capture(module, tuple(args), dict(kwargs or {}))
    seen: Observed = {}

    def keep(op: Op, given: tuple[Tensor, ...], made: tuple[Tensor, ...]) -> None:
        seen[op.name] = tuple(x.detach() for x in given), tuple(x.detach() for x in made)

    with torch.no_grad():
        parameters = dict(module.named_parameters(remove_duplicate=False))
        buffers = {key: held.clone() for key, held in module.named_buffers(remove_duplicate=False)}
        run(captured, captured.flatten(args, kwargs or {}), parameters, buffers, callback=keep)
    return analyse(captured.graph), seen


def splits(facts: Analysis, parts: Sequence[int] = (2, 3)) -> Iterator[tuple[Op, str, int]]:
    """Every op with every role that it has, once for each kind, shape and set of arguments."""
    known = set()
    for op in facts.graph.ops:
        shapes = tuple(facts.graph.values[name].shape for name in (*op.inputs, *op.outputs))
        arguments = tuple((name, repr(value)) for name, value in op.arguments)
        for role in facts.signatures[op.name].roles:
            for count in parts:
                key = (op.target, arguments, shapes, role.name, count)
                if role.fills(count) and key not in known:
                    known.add(key)
                    yield op, role.name, count


def local_ops(facts: Analysis, op: Op, role: str, mesh: Mesh) -> tuple[Program, Op]:
    """The op as a program of its own, with the layouts that the role gives it."""
    inputs, outputs = facts.signatures[op.name].layouts({"tp": role}, mesh)
    names = tuple(f"{name}@use{at}" for at, name in enumerate(op.inputs))  # one value may be read in two layouts
    values, layouts = dict(facts.graph.values), {}
    for name, origin, layout in zip((*names, *op.outputs), (*op.inputs, *op.outputs), (*inputs, *outputs), strict=True):
        values[name] = dataclasses.replace(facts.graph.values[origin], name=name)
        layouts[name] = layout
    renamed = dataclasses.replace(op, inputs=names)
    program = Program(
        graph=facts.graph, facts=facts, mesh=mesh, plan_name="", plan_policy="", values=values, layouts=layouts,
        holdings=(), body=(renamed,),
    )  # fmt: skip
    return localize(program), renamed


def check_split(facts: Analysis, seen: Observed, op: Op, role: str, parts: int) -> bool:
    """Assert that the split is right; False where an algorithm of the runtime does it (tested there)."""
    mesh = Mesh(axes=(Axis(name="tp", size=parts),))
    program, renamed = local_ops(facts, op, role, mesh)
    if any(local.target.startswith(("runtime.", "call.")) for local in program.body):
        return False
    said = f"{op} on {role} over {parts}"
    given, _ = seen[op.name]
    whole = [x.clone().requires_grad_(_wants(facts, name, x)) for x, name in zip(given, op.inputs, strict=True)]
    expected = run_op(op, whole, {})
    gradients = [torch.randn_like(x) if x.is_floating_point() or x.is_complex() else None for x in expected]
    wanted = _backward(expected, gradients, whole)
    ranks = []
    for index in range(parts):
        local = [_enter(x, program.layouts[n], mesh, index) for x, n in zip(given, renamed.inputs, strict=True)]
        local = [x.requires_grad_(held.requires_grad) for x, held in zip(local, whole, strict=True)]
        made = _run(program, dict(zip(renamed.inputs, local, strict=True)), mesh, index)
        outputs = [made[name] for name in op.outputs]
        back = [
            None if g is None else _enter(g, program.layouts[name].gradient(), mesh, index)
            for g, name in zip(gradients, op.outputs, strict=True)
        ]
        ranks.append((outputs, _backward(outputs, back, local)))
    for at, name in enumerate(op.outputs):
        _assert_lies([out[at] for out, _ in ranks], expected[at], program.layouts[name], mesh, f"{said}: {name}")
    for at, name in enumerate(renamed.inputs):
        if wanted[at] is not None:
            layout = program.layouts[name]
            held = [grads[at] for _, grads in ranks]
            _assert_lies(held, wanted[at], layout.gradient(), mesh, f"{said}: gradient of {name}")
    return True


def _wants(facts: Analysis, name: str, tensor: Tensor) -> bool:
    return facts.graph.values[name].gradient and (tensor.is_floating_point() or tensor.is_complex())


def _run(program: Program, values: dict[str, Tensor], mesh: Mesh, index: int) -> dict[str, Tensor]:
    for op in program.body:
        arguments = tuple((name, _numbers(value, mesh, index)) for name, value in op.arguments)
        op = dataclasses.replace(op, arguments=arguments)
        values.update(zip(op.outputs, run_op(op, [values[name] for name in op.inputs], {}), strict=True))
    return values


def _numbers(value: Any, mesh: Mesh, index: int) -> Any:
    if isinstance(value, Size):
        return value.local(mesh.sizes, {"tp": index})
    return tuple(_numbers(held, mesh, index) for held in value) if isinstance(value, tuple) else value


def _cut(x: Tensor, layout: Layout, mesh: Mesh, index: int) -> Tensor:
    for dim, runs in enumerate(piece_of(layout, x.shape, mesh.sizes, {"tp": index}).spans):
        x = torch.cat([x.narrow(dim, start, length) for start, length in runs] or [x.narrow(dim, 0, 0)], dim)
    return x


def _enter(x: Tensor, layout: Layout, mesh: Mesh, index: int) -> Tensor:
    """What a rank gets; a partial value enters as terms that sum to it."""
    x = _cut(x, layout, mesh, index).clone()
    if not isinstance(layout.placement("tp"), Partial):
        return x
    return x * (2.0 if index == 0 else -1.0 / (mesh.size - 1))


def _backward(outputs: Sequence[Tensor], gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]) -> list[Any]:
    pairs = [(y, g) for y, g in zip(outputs, gradients, strict=True) if y.requires_grad and g is not None]
    needed = [x for x in inputs if x.requires_grad]
    if not pairs or not needed:
        return [None] * len(inputs)
    found = iter(torch.autograd.grad([y for y, _ in pairs], needed, [g for _, g in pairs], allow_unused=True))
    return [next(found) if x.requires_grad else None for x in inputs]


def _assert_lies(held: list[Tensor], whole: Tensor, layout: Layout, mesh: Mesh, said: str) -> None:
    placement = layout.placement("tp")
    if isinstance(placement, Partial):
        join = {"sum": torch.add, "max": torch.maximum, "min": torch.minimum}[placement.op]
        held = [functools.reduce(join, held)] * len(held)
    for index, mine in enumerate(held):
        theirs = _cut(whole, layout, mesh, index)
        assert mine is not None, f"{said}: there is none on rank {index}"
        assert mine.shape == theirs.shape, f"{said} has {list(mine.shape)}, not {list(theirs.shape)}"
        if theirs.numel() and (theirs.is_floating_point() or theirs.is_complex()):
            finite = torch.isfinite(theirs)
            assert torch.equal(torch.isfinite(mine), finite), f"{said}: other places are infinite"
            apart = (mine - theirs)[finite].abs().sum() / (1 + theirs[finite].abs().sum())
            limit = 1e-9 if theirs.dtype in (torch.float64, torch.complex128) else 1e-4
            assert apart < limit, f"{said} is off by {apart:.2g}"
        else:
            assert torch.equal(mine, theirs), said

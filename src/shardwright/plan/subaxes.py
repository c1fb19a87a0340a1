"""An axis that is larger than what it is to share, as two axes or more: 2 KV heads on tp=4 (GQA).

    tp=4   4 heads of queries in 2 groups, each with its KV head
    tp0=2  takes the groups                  of queries, keys and values
    tp1=2  takes the queries in a group      keys and values are replicated along it, their gradients pending sums

Everything that 4 devices can share is sharded by both, one after the other, which is the same as sharding by 4. So sums
go over both at once, and there is no sum more than with one axis.

`refine` finds the sizes. `split_inner_axis` is what a policy does on an inner axis, given what it did on the axis
around it: it takes nothing that would need a reshard which the outer axis does not need as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

from ..cost import flops
from ..errors import PlanError
from ..ir import Op
from ..layout import Axis, Mesh, Partial, chunk_bounds, fills_every_chunk
from ..rules import Analysis, Role
from .builder import PlanBuilder
from .meshes import divisors
from .strings import PolicyRequest, subaxes

WORTH = 0.05
"""The part of a model's arithmetic that makes it worth to refine an axis."""
NEAR = 1.02
"""Arithmetic that is so near to the least is as good, with fewer parts."""

Policy = Callable[[PlanBuilder, Axis], None]
Picks = dict[str, Role]
"""What some ops take on an axis, by their names."""


def families(builder: PlanBuilder, axis: Axis) -> dict[int, tuple[Op, ...]]:
    """The atoms that an axis takes, each with the ops that are split on it."""
    ops_by_atom: dict[int, list[Op]] = {}
    for op in builder.ops:
        role = builder.role_on(op, axis)
        if role is not None:
            ops_by_atom.setdefault(role.atom, []).append(op)
    return {atom: tuple(ops) for atom, ops in ops_by_atom.items()}


def refine(request: PolicyRequest, analysis: Analysis, policy: Policy) -> tuple[PolicyRequest, tuple[str, ...]]:
    """The request with axes of tensor parallelism refined where that serves, and notes that say so."""
    refinements: dict[tuple[str, int], tuple[tuple[int, ...], str]] = {}
    for size in request.stages or (0,):
        for name, axis in request.asked_of(size):
            if name in ("tp", "sp") and (axis.name, axis.size) not in refinements:
                refinements[axis.name, axis.size] = _refined(analysis, axis, policy)
    refined = {axis: refinement for (axis, _), refinement in refinements.items() if len(refinement[0]) > 1}
    notes = tuple(note for _, note in refined.values())
    return replace(request, refined=tuple((axis, sizes) for axis, (sizes, _) in refined.items())), notes


def _refined(analysis: Analysis, axis: Axis, policy: Policy) -> tuple[tuple[int, ...], str]:
    """The sizes of an axis' parts, one if it is best left alone, and why."""
    sizes = analysis.atoms.size
    if not any(fills_every_chunk(sizes[atom], axis.size) for atom in analysis.owned):
        return (axis.size,), ""  # nothing can be shared at all, which is for the policy to say
    wanted = [
        atom for atom in analysis.owned if not fills_every_chunk(sizes[atom], axis.size) and _is_closed(analysis, atom)
    ]
    best = (0.0, axis.size, 0)  # arithmetic, the outer axis, an atom that it serves
    for outer in {math.gcd(sizes[atom], axis.size) for atom in wanted} - {1}:
        builder = _tried(analysis, axis, (outer,), policy)
        ops_by_atom = families(builder, builder.mesh.axes[0])
        fit = [atom for atom in ops_by_atom if atom in wanted and math.gcd(sizes[atom], axis.size) == outer]
        served = [atom for atom in fit if _is_closed(analysis, atom, ops_by_atom[atom])]
        work = sum(flops(builder.signature(op)) for atom in served for op in ops_by_atom[atom])
        if work >= WORTH * sum(flops(builder.signature(op)) for op in builder.ops) > 0:
            best = max(best, (work, outer, served[0]))
    _, outer, atom = best
    if outer == axis.size:
        return (axis.size,), ""
    parts = _inner_sizes(analysis, axis, outer, policy)
    return parts, _note(analysis, axis, parts, atom)


def _inner_sizes(analysis: Analysis, axis: Axis, outer: int, policy: Policy) -> tuple[int, ...]:
    """An axis from its outer part on, in as few parts as do with which devices have the least arithmetic."""
    options = sorted(((outer, *rest) for rest in _products(axis.size // outer)), key=len)
    if len(options) == 1:
        return options[0]
    work = {parts: _arithmetic(_tried(analysis, axis, parts, policy)) for parts in options}
    least = min(work.values())
    return next(parts for parts in options if work[parts] <= NEAR * least)


def _is_closed(analysis: Analysis, atom: int, ops: Sequence[Op] | None = None) -> bool:
    """Whether nothing is gathered for other ops if those that have an atom, or some of them, are split on it."""
    roles = {op.name: role for op, role in analysis.by_atom.get(atom, ()) if ops is None or op in ops}
    for name, role in roles.items():
        for bound in analysis.signatures[name].outputs:
            users = analysis.graph.users[bound.value] if bound.dim_of(role.label) is not None else ()
            if any(user.name not in roles for user, _ in users):
                return False
    return True


def _arithmetic(builder: PlanBuilder) -> float:
    """The arithmetic of the device that has the most."""
    total = 0.0
    for op in builder.ops:
        work, left = flops(builder.signature(op)), dict[int, int]()
        for axis in builder.mesh.axes:
            role = builder.role_on(op, axis)
            if role is not None:
                size = left.get(role.atom, role.size)
                left[role.atom] = chunk_bounds(size, axis.size, 0)[1]
                work *= left[role.atom] / size
        total += work
    return total


def _products(number: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as a product of factors in order."""
    if number == 1:
        yield ()
    for part in divisors(number)[1:]:
        yield from ((part, *rest) for rest in _products(number // part))


def _tried(analysis: Analysis, axis: Axis, parts: Sequence[int], policy: Policy) -> PlanBuilder:
    """What a policy does on an axis of these parts."""
    axes = subaxes(axis, parts)
    builder = PlanBuilder(analysis.graph, Mesh(axes=axes), analysis)
    policy(builder, axes[0])
    for outer, inner in pairwise(axes):
        split_inner_axis(builder, inner, outer)
    return builder


def _note(analysis: Analysis, axis: Axis, parts: Sequence[int], atom: int) -> str:
    size, graph = analysis.atoms.size[atom], analysis.graph
    key = next(
        p.key for p in graph.parameters if any(atom in analysis.atoms.splittable(d) for d in analysis.dims[p.value])
    )
    mesh = " x ".join(f"{part.name}={part.size}" for part in subaxes(axis, parts))
    return (
        f"{axis.name}={axis.size} is {mesh}: {axis.size} devices can't share the {size} parts of {key} and others, and "
        f"{parts[0]} can; what can be split further is, the rest is the same along the inner axis"
    )


def split_inner_axis(builder: PlanBuilder, axis: Axis, outer: Axis) -> None:
    """Split on an inner axis what its outer axis has split: on the same atom if it is long enough, else another."""
    for atom, ops in families(builder, outer).items():
        _, picks = _best(builder, axis, outer, atom, ops)
        for op in ops:
            if op.name in picks:
                builder.split(op, axis, picks[op.name])


def _best(builder: PlanBuilder, axis: Axis, outer: Axis, atom: int, ops: Sequence[Op]) -> tuple[float, Picks]:
    """What the ops of a family best take on an inner axis, and the part of their arithmetic that a device then does."""
    total = sum(flops(builder.signature(op)) for op in ops)
    options: list[tuple[float, Picks]] = [(1.0, {})]
    for other in (atom, *_others(builder, atom, ops)):
        picks = _closed(builder, axis, outer, other, ops, same=other == atom)
        if not picks:
            continue
        left = builder.left_of(next(op for op in ops if op.name in picks), axis, other)
        part = chunk_bounds(left, axis.size, 0)[1] / left
        done = sum(flops(builder.signature(op)) for op in ops if op.name in picks)
        options.append((1.0 - (1.0 - part) * (done / total if total else 1.0), picks))
    return min(options, key=lambda option: round(option[0], 6))


def _others(builder: PlanBuilder, atom: int, ops: Sequence[Op]) -> Iterator[int]:
    """Other atoms of weights that ops of a family have."""
    seen = {role.atom: None for op in ops for role in builder.roles(op)}
    yield from (other for other in seen if other != atom and other in builder.analysis.owned)


def _closed(builder: PlanBuilder, axis: Axis, outer: Axis, atom: int, ops: Sequence[Op], *, same: bool) -> Picks:
    """The ops that can take an atom on the inner axis so that no more is sent than on the outer axis alone.

    On the same atom all do what they do on the outer axis, and every reshard there goes over both axes at once. On
    another atom an op drops out if its result is sharded and an op reads it that does not take it so, or if it is a
    pending sum over the inner axis only.
    """
    picks: Picks = {}
    for op in ops:
        role = builder.role_on(op, outer) if same else builder.role_among(op, axis, (atom,))
        even = not same or atom not in builder.analysis.owned or _has_algorithm(builder, op, role)
        if role is not None and _fits(builder, op, axis, role, even=even):
            picks[op.name] = role
    if same:
        return picks if len(picks) == len(ops) else {}
    sinks, dropped = set(builder.graph.sinks()), True
    by_name = {op.name: op for op in ops}
    while dropped:
        remaining = {
            name: r for name, r in picks.items() if not _sends(builder, axis, outer, by_name[name], r, picks, sinks)
        }
        dropped = len(remaining) < len(picks)
        picks = remaining
    return picks


def _has_algorithm(builder: PlanBuilder, op: Op, role: Role | None) -> bool:
    """Whether an op is split by an algorithm, which knows even parts of two axes only."""
    rule = builder.signature(op).rule
    return rule is not None and role is not None and role.label in rule.algorithms


def _fits(builder: PlanBuilder, op: Op, axis: Axis, role: Role, *, even: bool) -> bool:
    left = builder.left_of(op, axis, role.atom)
    if not fills_every_chunk(left, axis.size) or (even and left % axis.size):
        return False
    try:
        builder.signature(op).layouts({**builder.choices.get(op.name, {}), axis.name: role.name}, builder.mesh)
    except PlanError:  # the sizes of some tensor do not divide
        return False
    return True


def _sends(builder: PlanBuilder, axis: Axis, outer: Axis, op: Op, role: Role, picks: Picks, sinks: set[str]) -> bool:
    """Whether a result would be gathered or summed over the inner axis where the outer axis does no such thing."""
    _, outputs = builder.signature(op).layouts({**builder.choices[op.name], axis.name: role.name}, builder.mesh)
    for name, layout in zip(op.outputs, outputs, strict=True):
        inner = layout.placement(axis.name)
        if isinstance(inner, Partial) and not isinstance(layout.placement(outer.name), Partial):
            return True
        if inner is None and (name in sinks or any(user.name not in picks for user, _ in builder.graph.users[name])):
            return True
    return False

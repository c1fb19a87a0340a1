"""The fixed policies. Each is a function of a draft and an axis; an expert's own looks the same.

def mine(draft: Draft, axis: Axis) -> None:
    for op in draft.ops:
        for role in draft.roles(op):
            if ...:
                draft.split(op, axis, role)
"""

from __future__ import annotations

from collections.abc import Callable

from ..cost import flops, is_matmul
from ..errors import PlanError
from ..ir import Graph
from ..layout import Axis, chunk_bounds
from ..rules import Analysis, analyse
from .builder import PlanBuilder
from .plan import Plan
from .replica_axes import replicas
from .strings import PolicyRequest, outer_of
from .subaxes import refine, split_inner_axis

Policy = Callable[[PlanBuilder, Axis], None]


def dp(draft: PlanBuilder, axis: Axis) -> None:
    """Data parallel: every op that has the batch in it is split on the batch."""
    if draft.graph.batch is None or not draft.facts.batch:
        if draft.lenient:  # a last batch of one row
            return
        raise PlanError(f"{axis.name}={axis.size} splits the batch, but {_no_batch(draft.graph)}")
    for op in draft.ops:
        role = draft.role_among(op, axis, draft.facts.batch)
        if role is not None:
            draft.split(op, axis, role)


def _no_batch(graph: Graph) -> str:
    """Why there is no batch to split, and what to do."""
    shapes = ", ".join(f"{held.path} {list(graph.values[held.value].shape)}" for held in graph.inputs)
    if graph.batch is not None or not shapes:
        return f"a batch of {graph.batch} can't be" if shapes else "the model has no tensors as inputs"
    return (
        f"the inputs have no common batch dim that their sizes tell ({shapes}); name those that have none: "
        "unbatched=['mask']"
    )


def tp(draft: PlanBuilder, axis: Axis) -> None:
    """Tensor parallel: the atoms of parameters that split the most arithmetic for the least communication."""
    taken: set[str] = set()
    for atom in rank_atoms(draft, axis):
        fresh = [(op, role) for op, role in draft.facts.by_atom[atom] if op.name not in taken]
        if sum(flops(draft.signature(op)) for op, _ in fresh) < 0.3 * _work(draft, atom):
            continue  # what is left of this atom's ops is not worth its communication
        for op, role in fresh:
            if draft.facts.is_constant(op):
                continue
            draft.split(op, axis, draft.role_among(op, axis, (atom,)) or role)
            taken.add(op.name)
    if not taken:
        _refuse_too_large(draft, axis)
        draft.note(
            f"{axis.name}={axis.size}: no parameter has a dim that {axis.size} devices can share; all run the same"
        )


def _refuse_too_large(draft: PlanBuilder, axis: Axis) -> None:
    facts = draft.facts
    dims = [dim for parameter in draft.graph.parameters for dim in facts.dims[parameter.value]]
    most = max((facts.atoms.size[atom] for dim in dims for atom in facts.atoms.splittable(dim)), default=axis.size)
    if most < axis.size:
        raise PlanError(
            f"{axis.name}={axis.size} is larger than every dim of a parameter that can be split, at most {most}; "
            f"use {axis.name}={most} or less"
        )


def sp(draft: PlanBuilder, axis: Axis) -> None:
    """Tensor parallel with everything between the products split along the sequence."""
    tp(draft, axis)
    sequence = sequence_atoms(draft, axis)
    for op in draft.ops:
        free = draft.chosen(op, axis) is None and any(draft.graph.values[name].gradient for name in op.outputs)
        role = draft.role_among(op, axis, sequence) if free else None
        if role is not None:
            draft.split(op, axis, role)


def ep(draft: PlanBuilder, axis: Axis) -> None:
    """Expert parallel: data parallel, but layers of experts are split on their experts, and tokens travel."""
    dp(draft, axis)
    found = False
    for op in draft.ops:
        for role in draft.roles(op):
            if draft.signature(op).beside(role.label) is not None:
                draft.split(op, axis, role)
                found = True
    if not found:
        draft.note(f"{axis.name}={axis.size}: no layer of experts can be split; data parallel instead")


def zero(level: int) -> Policy:
    def policy(draft: PlanBuilder, axis: Axis) -> None:
        dp(draft, axis)
        for parameter in draft.graph.parameters:
            if parameter.trainable or level == 3:
                draft.store(parameter.key, axis, level)

    policy.__doc__ = {
        1: "Data parallel with the optimizer's state split.",
        2: "Data parallel with the optimizer's state and the gradients split.",
        3: "Data parallel with parameters, gradients and the optimizer's state split.",
    }[level]
    return policy


POLICIES: dict[str, Policy] = {
    "dp": dp, "tp": tp, "sp": sp, "ep": ep, "zero1": zero(1), "zero2": zero(2), "zero3": zero(3)
}  # fmt: skip


def build_plan(
    graph: Graph, request: PolicyRequest, facts: Analysis | None = None, cluster: str = "", *, lenient: bool = False
) -> Plan:
    """The plan that a plan string asks for.

    With `lenient` (a last batch), an axis that is too large is not used, and axes are refined as the request says.
    """
    facts, notes = facts or analyse(graph), tuple[str, ...]()
    if not lenient:
        _check_sizes(graph, request)
        request, notes = refine(request, facts, tp)
    draft = PlanBuilder(graph, request.mesh, facts, lenient=lenient)
    draft.notes += notes
    apply(draft, request)
    return draft.finish(str(request), cluster)


def apply(draft: PlanBuilder, request: PolicyRequest, size: int = 0) -> None:
    """Write what a request asks for on a draft, of the whole or of a stage of `size` devices."""
    for name, axis in request.parts_of(size):
        outer = outer_of(axis.name, draft.mesh)
        if outer is None:
            POLICIES[name](draft, axis)
        else:
            split_inner_axis(draft, axis, outer)
    if request.recompute:
        draft.recompute_layers()


def _check_sizes(graph: Graph, request: PolicyRequest) -> None:
    groups = replicas(request.mesh)
    if groups > 1 and graph.batch is not None and graph.batch % groups:
        raise PlanError(
            f"a batch of {graph.batch} does not divide over {groups} data-parallel devices ({request}); "
            f"use a batch of {-(-graph.batch // groups) * groups}, or another number of devices (the batch is dim 0 "
            "of the inputs: where that is something else, such as time, have the model transpose what it is given)"
        )


def _work(draft: PlanBuilder, atom: int) -> float:
    return sum(flops(draft.signature(op)) for op, _ in draft.facts.by_atom[atom])


def rank_atoms(draft: PlanBuilder, axis: Axis) -> list[int]:
    """Atoms of trainable or frozen weights that the axis can share, best arithmetic per byte moved first."""
    facts, values = draft.facts, draft.graph.values
    owned: dict[int, int] = {}
    for parameter in draft.graph.parameters:
        for dim in facts.dims[parameter.value]:
            for atom in facts.atoms.splittable(dim):
                owned[atom] = owned.get(atom, 0) + values[parameter.value].elements
    everything = sum(values[parameter.value].elements for parameter in draft.graph.parameters)
    multiplied = {
        atom for atom in owned if any(is_matmul(draft.signature(op)) for op, _ in facts.by_atom.get(atom, ()))
    }
    worth = {atom for atom, held in owned.items() if atom in multiplied or held > 0.1 * everything}
    found: list[tuple[float, int, int]] = []
    for order, atom in enumerate(sorted(worth & set(facts.by_atom))):
        size = facts.atoms.size[atom]
        if chunk_bounds(size, axis.size, axis.size - 1)[1] == 0 or atom in facts.batch:
            continue  # the last device would have nothing, which not every kernel can do
        if any(draft.signature(op).beside(role.label) is not None for op, role in facts.by_atom[atom]):
            continue  # experts are split together with the batch, which is for ep to say
        uneven = 0.5 if size % axis.size else 1.0
        gain = uneven * _work(draft, atom) / (bytes_moved(draft, axis, atom) + 1.0)
        found.append((-gain, order, atom))
    return [atom for _, _, atom in sorted(found)]


def bytes_moved(draft: PlanBuilder, axis: Axis, atom: int) -> float:
    """What is reduced or gathered if every op that can takes an atom on an axis, each value once."""
    graph, values = draft.graph, draft.graph.values
    split = {op.name for op, _ in draft.facts.by_atom[atom]}
    moved: dict[str, float] = {}
    for op, role in draft.facts.by_atom[atom]:
        inputs, outputs = draft.signature(op).layouts({axis.name: role.name}, draft.mesh)
        for name, layout in zip(op.outputs, outputs, strict=True):
            if layout.cut_of(axis.name) is None and layout.rest:
                moved[name] = 2.0 * values[name].bytes
            elif any(user.name not in split for user, _ in graph.users[name]):
                moved[name] = 1.0 * values[name].bytes
        for name, layout in zip(op.inputs, inputs, strict=True):
            producer = graph.producer.get(name)
            if graph.parameter_of(name) is not None:
                continue
            if layout.rest and values[name].gradient:
                moved[name] = 2.0 * values[name].bytes
            elif layout.cut_of(axis.name) and producer is not None and producer.name not in split:
                moved[name] = 0.0 if name in draft.facts.constants else 1.0 * values[name].bytes
    return sum(moved.values())


def sequence_atoms(draft: PlanBuilder, axis: Axis) -> set[int]:
    """Atoms of the middle dim of [batch, sequence, features] activations."""
    facts, values = draft.facts, draft.graph.values
    found: set[int] = set()
    for op in draft.ops:
        if draft.chosen(op, axis) is None:
            for name in op.outputs:
                if (
                    len(values[name].shape) == 3
                    and values[name].gradient
                    and values[name].shape[0] == draft.graph.batch
                ):
                    found.update(facts.atoms.splittable(facts.dims[name][1]))
    return {atom for atom in found - facts.batch if chunk_bounds(facts.atoms.size[atom], axis.size, axis.size - 1)[1]}

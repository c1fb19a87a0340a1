"""The built-in policies. Each is a function of a plan builder and an axis; a custom policy looks the same.

def mine(builder: PlanBuilder, axis: Axis) -> None:
    for op in builder.ops:
        for role in builder.roles(op):
            if ...:
                builder.split(op, axis, role)
"""

from __future__ import annotations

from collections.abc import Callable

from ..cost import flops, is_matmul
from ..cost.reshard_prices import prices_of
from ..cost.reshard_search import cheapest_tree
from ..errors import PlanError
from ..ir import Graph, Op
from ..ir.graph import ITEM_SIZE
from ..layout import Axis, Layout, chunk_bounds, replicated
from ..ops import Kernel, spec_of
from ..rules import Analysis, Role, analyse
from ..rules.replica_axes import replicas
from ..storage import SHARDED_KINDS, Storage
from .builder import PlanBuilder
from .plan import Plan
from .strings import CONTEXT, PolicyRequest, outer_of
from .subaxes import refine, split_inner_axis

Policy = Callable[[PlanBuilder, Axis], None]


def dp(builder: PlanBuilder, axis: Axis) -> None:
    """Data parallel: every op that has the batch in it is split on the batch."""
    if builder.graph.batch is None or not builder.analysis.batch:
        if builder.lenient:  # a last batch of one sample
            return
        raise PlanError(f"{axis.name}={axis.size} splits the batch, but {_no_batch(builder.graph)}")
    for op in builder.ops:
        role = builder.role_among(op, axis, builder.analysis.batch)
        if role is not None:
            builder.split(op, axis, role)


def _no_batch(graph: Graph) -> str:
    """Why there is no batch to split, and what to do."""
    shapes = ", ".join(f"{item.path} {list(graph.values[item.value].shape)}" for item in graph.inputs)
    if graph.batch is not None or not shapes:
        return f"a batch of {graph.batch} can't be" if shapes else "the model has no tensors as inputs"
    return (
        f"the inputs have no common batch dim that their sizes tell ({shapes}); name those that have none: "
        "CompileOptions(unbatched=['mask'])"
    )


def tp(builder: PlanBuilder, axis: Axis) -> None:
    """Tensor parallel: the atoms of parameters that split the most arithmetic for the least communication."""
    split: set[str] = set()
    for atom in rank_atoms(builder, axis):
        fresh = [(op, role) for op, role in builder.analysis.by_atom[atom] if op.name not in split]
        if sum(flops(builder.signature(op)) for op, _ in fresh) < 0.3 * _work(builder, atom):
            continue  # what is left of this atom's ops is not worth its communication
        for op, role in fresh:
            if builder.analysis.is_constant(op):
                continue
            builder.split(op, axis, builder.role_among(op, axis, (atom,)) or role)
            split.add(op.name)
    if not split:
        _refuse_too_large(builder, axis)
        builder.note(
            f"{axis.name}={axis.size}: no parameter has a dim that {axis.size} devices can share; all run the same"
        )


def _refuse_too_large(builder: PlanBuilder, axis: Axis) -> None:
    analysis = builder.analysis
    dims = [dim for parameter in builder.graph.parameters for dim in analysis.dims[parameter.value]]
    most = max(
        (analysis.atoms.size[atom] for dim in dims for atom in analysis.atoms.splittable(dim)), default=axis.size
    )
    if most < axis.size:
        raise PlanError(
            f"{axis.name}={axis.size} is larger than every dim of a parameter that can be split, at most {most}; "
            f"use {axis.name}={most} or less"
        )


def sp(builder: PlanBuilder, axis: Axis) -> None:
    """Tensor parallel with everything between the matmuls split along the sequence (sequence parallelism)."""
    tp(builder, axis)
    sequence = sequence_atoms(builder, axis)
    for op in builder.ops:
        free = builder.chosen(op, axis) is None and any(builder.graph.values[name].gradient for name in op.outputs)
        role = builder.role_among(op, axis, sequence) if free else None
        if role is not None:
            builder.split(op, axis, role)


def context(attention: str) -> Policy:
    """A policy that splits the sequence through the whole model, and attention by a label, or on heads.

    Where attention can't be split so (dropout does not go around a ring, heads may be too few), queries are split.
    """

    def policy(builder: PlanBuilder, axis: Axis) -> None:
        sequence = sequence_atoms(builder, axis) | _attended(builder, axis)
        if not sequence and builder.lenient:  # a call with a short sequence
            return
        if not sequence:
            raise PlanError(
                f"{axis.name}={axis.size} splits the sequence of activations [batch, sequence, features], and "
                f"{builder.graph.name} has none with {axis.size} places or more; use dp or tp"
            )
        for op in builder.ops:
            role = _attention_role(builder, op, axis, attention, sequence)
            if role is None:
                role = builder.role_among(op, axis, sequence)
                _note_other_split(builder, op, axis, attention)
            if role is not None and role.fills(axis.size):
                builder.split(op, axis, role)

    return policy


def _is_attention(op: Op) -> bool:
    return spec_of(op.target).kernel is Kernel.ATTENTION


def _note_other_split(builder: PlanBuilder, op: Op, axis: Axis, attention: str) -> None:
    wanted = {"t": "a ring", "s": "gathered keys", "heads": "heads"}[attention]
    if _is_attention(op):
        builder.note(f"{axis.name}={axis.size}: attention can't be split by {wanted} and is split on its queries: {op}")


def _attended(builder: PlanBuilder, axis: Axis) -> set[int]:
    """The atoms of the queries and keys of fused attention."""
    ops = [op for op in builder.ops if _is_attention(op)]
    roles = [role for op in ops for role in builder.roles(op) if role.label in ("s", "t") and role.fills(axis.size)]
    return {role.atom for role in roles} - builder.analysis.batch


def _attention_role(builder: PlanBuilder, op: Op, axis: Axis, attention: str, sequence: set[int]) -> Role | None:
    """How an op that looks from place to place is split: fused attention by its label, any other only on heads."""
    if attention != "heads":
        roles = builder.roles(op) if _is_attention(op) else ()
        return next((role for role in roles if role.label == attention and role.fills(axis.size)), None)
    if not _is_attention(op) and not _mixes(builder, op, sequence):
        return None
    heads = [role for role in builder.roles(op) if role.atom in builder.analysis.owned - sequence]
    left = {role.atom: builder.left_of(op, axis, role.atom) for role in heads}
    return next((role for role in heads if left[role.atom] and left[role.atom] % axis.size == 0), None)


def _mixes(builder: PlanBuilder, op: Op, sequence: set[int]) -> bool:
    """Whether a tensor of an op has two dims of places: scores [queries, keys]."""
    analysis, signature = builder.analysis, builder.signature(op)
    for bound in (*signature.inputs, *signature.outputs):
        places = [dim for dim in analysis.dims[bound.value] if sequence.intersection(analysis.atoms.splittable(dim))]
        if len(places) > 1:
            return True
    return False


def ep(builder: PlanBuilder, axis: Axis) -> None:
    """Expert parallel: data parallel, but layers of experts are split on their experts, and tokens travel."""
    dp(builder, axis)
    has_experts = False
    for op in builder.ops:
        for role in builder.roles(op):
            if builder.signature(op).is_split_by("experts", role):
                builder.split(op, axis, role)
                has_experts = True
    if not has_experts:
        builder.note(f"{axis.name}={axis.size}: no layer of experts can be split; data parallel instead")


def stored_as(kind: type[Storage]) -> Policy:
    def policy(builder: PlanBuilder, axis: Axis) -> None:
        dp(builder, axis)
        for parameter in builder.graph.parameters:
            if parameter.trainable or kind.shards_parameter:
                builder.store(parameter.key, axis, kind.symbol)

    policy.__doc__ = f"Data parallel with {kind.describe()} sharded ({kind.title})."
    return policy


POLICIES: dict[str, Policy] = {
    "dp": dp, "tp": tp, "sp": sp, "ep": ep,
    "cp": context("t"), "cp_all_gather": context("s"), "ulysses": context("heads"),
    **{kind.name: stored_as(kind) for kind in SHARDED_KINDS}
}  # fmt: skip


def build_plan(
    graph: Graph, request: PolicyRequest, analysis: Analysis | None = None, cluster: str = "", *,
    lenient: bool = False, afterwards: Callable[[PlanBuilder], None] | None = None,
) -> Plan:  # fmt: skip
    """The plan that a plan string asks for.

    `afterwards` has the last word. With `lenient` (a last batch), an axis that is too large is not used, and axes are
    refined as the request says.
    """
    analysis, notes = analysis or analyse(graph), tuple[str, ...]()
    if not lenient:
        _check_sizes(graph, request)
        request, notes = refine(request, analysis, tp)
    builder = PlanBuilder(graph, request.mesh, analysis, lenient=lenient)
    builder.notes += notes
    apply(builder, request)
    if afterwards is not None:
        afterwards(builder)
    return builder.finish(str(request), cluster)


def apply(builder: PlanBuilder, request: PolicyRequest, size: int = 0) -> None:
    """Apply a request to a plan builder, for the whole model or a stage of `size` devices."""
    parts = sorted(request.parts_of(size), key=lambda part: part[0] in CONTEXT)  # Ulysses takes heads that tp leaves
    for name, axis in parts:
        outer = outer_of(axis.name, builder.mesh)
        if outer is None:
            POLICIES[name](builder, axis)
        else:
            split_inner_axis(builder, axis, outer)
    if request.recompute:
        builder.recompute_layers()
    if request.chunked_loss is not None and not builder.lenient:  # a later specialization takes over what it can
        builder.chunk_losses(request.chunked_loss or None)


def _check_sizes(graph: Graph, request: PolicyRequest) -> None:
    groups = replicas(request.mesh)
    if groups > 1 and graph.batch is not None and graph.batch % groups:
        raise PlanError(
            f"a batch of {graph.batch} does not divide over {groups} data-parallel devices ({request}); "
            f"use a batch of {-(-graph.batch // groups) * groups}, or another number of devices (the batch is dim 0 "
            "of the inputs: where that is something else, such as time, have the model transpose what it is given)"
        )


def _work(builder: PlanBuilder, atom: int) -> float:
    return sum(flops(builder.signature(op)) for op, _ in builder.analysis.by_atom[atom])


def rank_atoms(builder: PlanBuilder, axis: Axis) -> list[int]:
    """Atoms of trainable or frozen weights that the axis can share, best arithmetic per byte moved first."""
    analysis, values = builder.analysis, builder.graph.values
    owned: dict[int, int] = {}
    for parameter in builder.graph.parameters:
        for dim in analysis.dims[parameter.value]:
            for atom in analysis.atoms.splittable(dim):
                owned[atom] = owned.get(atom, 0) + values[parameter.value].elements
    everything = sum(values[parameter.value].elements for parameter in builder.graph.parameters)
    multiplied = {
        atom for atom in owned if any(is_matmul(builder.signature(op)) for op, _ in analysis.by_atom.get(atom, ()))
    }
    worth = {atom for atom, elements in owned.items() if atom in multiplied or elements > 0.1 * everything}
    ranked: list[tuple[float, int, int]] = []
    for order, atom in enumerate(sorted(worth & set(analysis.by_atom))):
        size = analysis.atoms.size[atom]
        if chunk_bounds(size, axis.size, axis.size - 1)[1] == 0 or atom in analysis.batch:
            continue  # the last device would have nothing, which not every kernel can do
        if any(builder.signature(op).is_split_by("experts", role) for op, role in analysis.by_atom[atom]):
            continue  # experts are split together with the batch, which is for ep to say
        uneven = 0.5 if size % axis.size else 1.0
        gain = uneven * _work(builder, atom) / (bytes_moved(builder, axis, atom) + 1.0)
        ranked.append((-gain, order, atom))
    return [atom for _, _, atom in sorted(ranked)]


def bytes_moved(builder: PlanBuilder, axis: Axis, atom: int) -> float:
    """The price of the reshards if every op that can takes an atom on an axis, and all others are replicated."""
    graph, analysis, prices = builder.graph, builder.analysis, prices_of(builder.mesh, None)
    produced, read = dict[str, Layout](), dict[tuple[str, int], Layout]()
    for op, role in analysis.by_atom[atom]:
        if not analysis.is_constant(op):
            inputs, outputs = builder.signature(op).layouts({axis.name: role.name}, builder.mesh)
            produced |= zip(op.outputs, outputs, strict=True)
            read |= {(op.name, at): layout for at, layout in enumerate(inputs)}
    moved = 0.0
    for name in dict.fromkeys((*produced, *(graph.by_name[op].inputs[at] for op, at in read))):
        if graph.parameter_of(name) is None:
            value, whole = graph.values[name], replicated(len(graph.values[name].shape))
            goals = [read.get((user.name, at), whole) for user, at in graph.users[name]]
            item = ITEM_SIZE.get(value.dtype, 4)
            moved += cheapest_tree(produced.get(name, whole), goals, value.shape, item, prices, value.gradient).cost
    return moved


def sequence_atoms(builder: PlanBuilder, axis: Axis) -> set[int]:
    """Atoms of the middle dim of [batch, sequence, features] activations."""
    analysis, values = builder.analysis, builder.graph.values
    atoms: set[int] = set()
    for op in builder.ops:
        if builder.chosen(op, axis) is None:
            for name in op.outputs:
                if (
                    len(values[name].shape) == 3
                    and values[name].gradient
                    and values[name].shape[0] == builder.graph.batch
                ):
                    atoms.update(analysis.atoms.splittable(analysis.dims[name][1]))
    return {
        atom for atom in atoms - analysis.batch if chunk_bounds(analysis.atoms.size[atom], axis.size, axis.size - 1)[1]
    }

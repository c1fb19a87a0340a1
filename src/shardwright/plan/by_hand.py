"""What constraints and policies decide, written to a plan builder without a search.

    demands      ops are split as one of their demands says, or replicated
    together     what is decided for one of several ops holds for all
    follow       an op that nobody decides about takes the shards that it reads, where it can: nothing is sent for it
    the rest     storage, recomputation, chunked losses

`check_decided` looks at what came of it: a plan that does not keep to a demand is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from ..errors import PlanError, raise_all
from ..ir import Op
from ..ir.paths import is_inside
from ..layout import MB, Axis, Mesh, fills_every_chunk
from ..rules import Analysis, Choices, Role, without_stripes
from ..storage import kind_named, of_zero, sharded_tensors
from .builder import PlanBuilder
from .constraint_kinds import ChoiceDemand
from .limits import RUN_WHOLE, Limits
from .plan import PlanStage
from .policies import rank_atoms


def decide(builder: PlanBuilder, limits: Limits, names: Collection[str] | None = None) -> None:
    """Write limits to a plan builder. `names`: the ops that run on its mesh, all of them if it is not given."""
    inside = [op for op in builder.ops if names is None or op.name in names]
    faults: list[str] = []
    for op in inside:
        for demand in limits.demands.get(op.name, ()):
            try:
                _meet(builder, op, demand)
            except PlanError as error:
                faults.append(f"{because(limits, op.name)}: {error}")
    raise_all(PlanError, "the plan can't be as it is asked for:", list(dict.fromkeys(faults)))
    _tie(builder, limits, inside)
    _store(builder, limits, inside)
    _recompute(builder, limits)
    for name, chunks in limits.chunked.items():
        builder.chunk_loss(name, chunks)
    for name in limits.unchunked:
        builder.chunked.pop(name, None)


def because(limits: Limits, name: str) -> str:
    """Who asks for the choice of an op."""
    return " and ".join(limits.why.get(name, ("a constraint",)))


def _meet(builder: PlanBuilder, op: Op, demand: ChoiceDemand) -> None:
    """Choose for an op what a demand asks for."""
    axes = builder.mesh.axes if demand.axis is None else (_axis(builder, demand.axis),)
    if demand.is_met(builder.choices.get(op.name, {}), [axis.name for axis in axes]) and demand.picks != RUN_WHOLE:
        return
    if demand.picks == RUN_WHOLE:
        for axis in axes:
            builder.replicate(op, axis)
        return
    if demand.axis is None and len(axes) > 1:
        raise PlanError(f"it does not say on which axis {op} is split; there are {builder.mesh}")
    if not axes:
        raise PlanError(f"{op} can't be split: there is one device")
    split(builder, op, axes[0], [role for role in builder.roles(op) if role.name in demand.picks])


def _axis(builder: PlanBuilder, name: str) -> Axis:
    if name not in builder.mesh.names:
        raise PlanError(f"there is no axis {name!r} in the mesh {builder.mesh}")
    return builder.mesh.axis(name)


def split(builder: PlanBuilder, op: Op, axis: Axis, roles: Sequence[Role]) -> None:
    """Split an op on the best of some roles: one that its inputs have, else the one with the most arithmetic."""
    fit = [role for role in roles if role.fills(axis.size)] or list(roles)
    role = fit[0]
    if len(fit) > 1:
        ranked = rank_atoms(builder, axis)
        order = {atom: place for place, atom in enumerate(ranked)}
        wanted = builder.role_among(op, axis, [role.atom for role in fit])
        agrees = wanted is not None and _is_read_so(builder, op, axis, wanted)
        role = wanted if agrees and wanted is not None else min(fit, key=lambda r: order.get(r.atom, len(order)))
    if role.atom in builder.analysis.batch and builder.left_of(op, axis, role.atom) % axis.size:
        raise PlanError(
            f"{op}: a batch of {builder.left_of(op, axis, role.atom)} does not divide over {axis.name}={axis.size}; "
            "use another batch size, or another axis"
        )
    left = builder.left_of(op, axis, role.atom)
    if role.fills(axis.size) and not fills_every_chunk(left, axis.size):
        raise PlanError(
            f"{op}: {role.name} has {role.size}, of which other axes leave {left} that {axis.name}={axis.size} can't "
            "share; use smaller axes"
        )
    builder.split(op, axis, role)
    try:
        builder.signature(op).layouts(builder.choices[op.name], builder.mesh)
    except PlanError:
        builder.choices[op.name].pop(axis.name)
        raise


def _is_read_so(builder: PlanBuilder, op: Op, axis: Axis, role: Role) -> bool:
    """Whether an op that makes an input of this one is split on the same atom."""
    makers = (builder.graph.producer.get(name) for name in op.inputs)
    roles = (builder.role_on(maker, axis) for maker in makers if maker is not None)
    return any(other is not None and other.atom == role.atom for other in roles)


def follow(builder: PlanBuilder, axis: Axis, limits: Limits, names: Collection[str] | None = None) -> None:
    """Ops that are open take the shards that they read, if all that they read sharded is sharded on one atom.

    Of ops that are tied, the first one decides: the others do the same, or none does.
    """
    inside = [op for op in builder.ops if names is None or op.name in names]
    groups = _groups(limits, inside)
    for op in inside:
        if not builder.is_open(op, axis):
            continue
        atoms = {atom for name in op.inputs if (atom := _sharded_on(builder, name, axis)) is not None}
        role = builder.role_among(op, axis, atoms) if len(atoms) == 1 else None
        tied = groups.get(limits.together.get(op.name, ""), [op])
        if role is not None and all(_can_take(builder, other, axis, role.name) for other in tied):
            for other in tied:
                builder.split(other, axis, builder.signature(other).role(role.name))
        elif len(tied) > 1:
            for other in tied:
                builder.replicate(other, axis)


def _can_take(builder: PlanBuilder, op: Op, axis: Axis, pick: str) -> bool:
    """Whether an op can be split on a role in even parts, beside what other axes do."""
    role = builder.signature(op).picked(pick)
    if role is None or not role.fills(axis.size) or builder.left_of(op, axis, role.atom) % axis.size:
        return False
    return builder.divides(op, axis, role)


def _groups(limits: Limits, ops: Sequence[Op]) -> dict[str, list[Op]]:
    """The ops that are tied together."""
    groups: dict[str, list[Op]] = {}
    for op in ops:
        if op.name in limits.together:
            groups.setdefault(limits.together[op.name], []).append(op)
    return groups


def _sharded_on(builder: PlanBuilder, value: str, axis: Axis) -> int | None:
    """The atom on which a value is made sharded along an axis."""
    maker = builder.graph.producer.get(value)
    role = None if maker is None else builder.role_on(maker, axis)
    if maker is None or role is None or builder.output_layout(maker, value).shard_of(axis.name) is None:
        return None
    return role.atom


def _tie(builder: PlanBuilder, limits: Limits, ops: Sequence[Op]) -> None:
    """What is decided for one op of a group holds for all."""
    for group in _groups(limits, ops).values():
        for axis in builder.mesh.axes:
            decided = [op for op in group if not builder.is_open(op, axis)]
            if not decided:
                continue
            for op in group:
                if builder.is_open(op, axis):
                    _choose_alike(builder, op, axis, decided[0])


def _choose_alike(builder: PlanBuilder, op: Op, axis: Axis, other: Op) -> None:
    choice = builder.chosen(other, axis)
    if choice is None:
        builder.replicate(op, axis)
    else:
        split(builder, op, axis, [builder.signature(op).role(choice)])


def _store(builder: PlanBuilder, limits: Limits, ops: Sequence[Op]) -> None:
    """Bring the storage of parameters within their limits."""
    if not limits.storing:
        return
    read, names = {name for op in ops for name in op.inputs}, {op.name for op in ops}
    every = {name: choice for name, choice in builder.choices.items() if name in names}
    copies = batch_axes(builder.analysis, every, builder.mesh)
    for parameter in builder.graph.parameters:
        limit = limits.storing.get(parameter.key)
        if limit is None or parameter.value not in read:
            continue
        stored = builder.storage.get(parameter.key, {})
        sharded = sharded_tensors(stored)
        number = int(min(max(sharded, limit.zero.least), limit.zero.most))
        kind = of_zero(number) if limit.kind is None else kind_named(limit.kind)
        axes = [limit.on] if limit.on is not None else list(stored) or copies
        if limit.kind is None and number == sharded and (limit.on is None or list(stored) == axes):
            continue
        if not parameter.trainable and kind.sharded() and not kind.shards_parameter:
            continue  # it has neither gradient nor optimizer state
        builder.storage[parameter.key] = kind(tuple(axes)).written() if kind.sharded() else {}


def batch_axes(analysis: Analysis, choices: Choices, mesh: Mesh) -> list[str]:
    """The axes along which the batch is split, so that gradients are summed over them; not the one in time."""
    split_on: dict[str, None] = {}
    for name, choice in choices.items():
        for axis, pick in choice.items():
            role = analysis.signatures[name].picked(pick)
            if role is not None and role.atom in analysis.batch and axis != MB:
                split_on[axis] = None
    return [axis for axis in mesh.names if axis in split_on]


def _recompute(builder: PlanBuilder, limits: Limits) -> None:
    never = {op.module_path for op in limits.never}
    recomputed = [path for path in builder.recomputed if not any(is_inside(at, path) for at in never)]
    for path in limits.must:
        if not any(is_inside(path, outer) for outer in recomputed):
            recomputed = [*(inner for inner in recomputed if not is_inside(inner, path)), path]
    builder.recomputed[:] = recomputed


def check_decided(analysis: Analysis, stages: Sequence[PlanStage], limits: Limits) -> None:
    """Refuse a plan in which a demand is not met, or ops are not split together that have to be."""
    faults: list[str] = []
    groups: dict[str, tuple[str, dict[str, str]]] = {}
    for stage in stages:
        names = stage.mesh.names
        for name, choice in stage.choices.items():
            for demand in limits.demands.get(name, ()):
                if not demand.is_met(choice, names):
                    faults.append(f"{because(limits, name)}: {name} is {_shown(choice)} in the plan")
            if name in limits.together:
                own = _splits(analysis, name, choice)
                first, other = groups.setdefault(limits.together[name], (name, own))
                if other != own:
                    faults.append(f"{name} is {_shown(choice)}, and {first}, tied to it, is {_shown(other)}")
    never = {op.name for op in limits.never}
    for path in (path for stage in stages for path in stage.recompute):
        if any(op.name in never for op in analysis.graph.under.get(path, ())):
            faults.append(f"{path} is recomputed, and must not be")
    raise_all(PlanError, "the plan does not keep to what is asked for:", list(dict.fromkeys(faults)))


def _splits(analysis: Analysis, name: str, choice: Mapping[str, str]) -> dict[str, str]:
    """What an op is split on along each axis of devices."""
    roles = {axis: analysis.signatures[name].picked(without_stripes(pick)) for axis, pick in choice.items()}
    return {axis: role.name for axis, role in roles.items() if role is not None and axis != MB}


def _shown(choice: Mapping[str, str]) -> str:
    return ", ".join(f"{axis}: {pick}" for axis, pick in choice.items()) or "replicated"


__all__ = ["batch_axes", "check_decided", "decide", "follow", "split"]

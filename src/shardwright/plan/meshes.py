"""The meshes that a cluster allows: how many axes, of which sizes, and over which links they lie.

Neighbours on the last axis are neighbours on the cluster. So with nodes of 8

    16            one axis over all
    8 x 2         an axis of 2 inside of nodes, one of 8 over nodes and inside
    2 x 8         an axis inside of nodes, one between them
    2 x 4 x 2     three: the first lies between nodes and splits the batch, nothing else

Any axis may do anything (an op picks its split on each), so that no other order of the axes is needed. The last of two
axes spans two nodes at most: lossy pruning, since two axes that both span many do what one does. When it is known what
they do, they are named for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations

from ..cluster import Cluster
from ..cost import flops, is_matmul
from ..layout import Axis, Mesh
from ..rules import Analysis
from .constraint_kinds import AxisConstraint

NAMES = ("x", "y", "z")


@dataclass(frozen=True, slots=True)
class MeshCandidate:
    """A mesh to look at; `data` are the axes that may split the batch only."""

    mesh: Mesh
    data: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " x ".join(str(axis.size) for axis in self.mesh.axes) or "1"


def candidates(cluster: Cluster, size: int | None = None, *, data_only: bool = False) -> Iterator[MeshCandidate]:
    """Meshes over the first `size` devices of a cluster, all of them if it is not given."""
    count = size or cluster.size
    inside = min(group.node.devices for group in cluster.groups)
    if count == 1:
        yield MeshCandidate(Mesh(axes=()))
        return
    yield _candidate((count,), data_only)
    for inner in divisors(count):
        if 1 < inner < count and inner <= max(2 * inside, 16):
            yield _candidate((count // inner, inner), data_only)
    if count > inside and count % inside == 0:
        for inner in divisors(inside):
            if 1 < inner < inside:
                yield _candidate((count // inside, inside // inner, inner), data_only)


def left_out(cluster: Cluster, size: int | None = None) -> Iterator[str]:
    """The meshes that are not tried, in words: the pruning that may lose something."""
    count = size or cluster.size
    inside = min(group.node.devices for group in cluster.groups)
    most = max(2 * inside, 16)
    if any(most < inner < count for inner in divisors(count)):
        yield f"meshes of two axes whose last has more than {most} devices were not looked at"
    three = any(divisors(count // part)[1:-1] for part in divisors(count)[1:-1])
    if three and count > inside and count % inside == 0:
        yield "of meshes with three axes only those were looked at whose first lies between nodes and splits the batch"
    elif three:
        yield "meshes with three axes were not looked at"


def name_axes(
    base: Sequence[MeshCandidate],
    constraints: Mapping[str, Sequence[AxisConstraint]],
    cluster: Cluster,
    data_only: bool = False,
) -> Iterator[MeshCandidate]:
    """Meshes that have axes of some names, and what is asked of those: the given ones, and all with just these axes."""
    if not constraints:
        yield from base
        return
    size = base[0].mesh.size
    order = sorted(
        constraints, key=lambda name: not any(constraint.data for constraint in constraints[name])
    )  # copies outside if all is equal
    known = {tuple(axis.size for axis in candidate.mesh.axes): candidate.data for candidate in base}
    seen: set[tuple[Axis, ...]] = set()
    for sizes in dict.fromkeys([*known, *_products(size, len(constraints))]):
        for places in permutations(range(len(sizes)), len(constraints)):
            name_at = dict(zip(places, order, strict=True))
            names = [name_at.get(at, NAMES[at]) for at in range(len(sizes))]
            mesh = Mesh(axes=tuple(Axis(name=name, size=size) for name, size in zip(names, sizes, strict=True)))
            if mesh.axes not in seen and all(
                _fits(constraint, mesh, cluster) for wanted in constraints.values() for constraint in wanted
            ):
                seen.add(mesh.axes)
                data = {
                    constraint.name for wanted in constraints.values() for constraint in wanted if constraint.data
                } | set(known.get(sizes, ()))
                yield MeshCandidate(mesh, tuple(mesh.names) if data_only else tuple(n for n in mesh.names if n in data))


def _fits(constraint: AxisConstraint, mesh: Mesh, cluster: Cluster) -> bool:
    if constraint.size is not None and mesh.sizes[constraint.name] not in constraint.size:
        return False
    return not constraint.inside or all(len(span.ranks) == 1 for span in cluster.spans(mesh, (constraint.name,)))


def _products(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """All ways to write a number as so many factors of 2 or more, in any order."""
    if count == 1 and number > 1:
        yield (number,)
    for part in divisors(number) if count > 1 else ():
        if part > 1:
            yield from ((part, *rest) for rest in _products(number // part, count - 1))


def _candidate(sizes: tuple[int, ...], data_only: bool) -> MeshCandidate:
    axes = tuple(Axis(name=name, size=size) for name, size in zip(NAMES, sizes, strict=False))
    data = tuple(axis.name for axis in axes) if data_only else (axes[0].name,) if len(axes) == 3 else ()
    return MeshCandidate(Mesh(axes=axes), data)


def divisors(number: int) -> list[int]:
    return [part for part in range(1, number + 1) if number % part == 0]


def axis_names(analysis: Analysis, mesh: Mesh, choices: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """dp for an axis that splits mostly the batch, cp the sequence, ep if it splits experts, else tp; numbered.

    Axes that somebody has named keep their names.
    """
    names = {name: name for name in mesh.names if name not in NAMES}
    every = [(s, role) for s in analysis.signatures.values() for role in s.roles]
    sequences = {role.atom for signature, role in every if signature.is_split_by("ring", role)} - analysis.owned
    for axis in mesh.axes:
        if axis.name in names:
            continue
        work = {"dp": 1e-9, "tp": 0.0, "cp": 0.0}
        experts = False
        for name, choice in choices.items():
            picked = choice.get(axis.name)
            signature = analysis.signatures[name]
            role = signature.picked(picked)
            if role is None:
                continue
            experts = experts or signature.is_split_by("experts", role)
            weight = flops(signature) if is_matmul(signature) else 1e-6
            work["dp" if role.atom in analysis.batch else "cp" if role.atom in sequences else "tp"] += weight
        kind = "ep" if experts else max(work, key=lambda name: work[name])
        numbered = (kind, *(f"{kind}{number}" for number in range(2, len(mesh.axes) + 2)))
        names[axis.name] = next(name for name in numbered if name not in names.values())
    return names

"""A rule bound to a call: which atoms every label stands for, and what a choice does to each tensor.

`analyse` goes over a graph once and gives every dim of every value its atoms and every op its `Signature`. The
ways to split an op are its **roles**: a label and one atom in it. A choice of one role per axis fixes all layouts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from ..errors import PlanError
from ..ir import Graph, Op
from ..layout import INVARIANT, PARTIAL, REPLICATE, Axis, Layout, Mesh, Partial, Placement, Shard, make_layout
from . import notation
from .atoms import Atoms, Dim
from .notation import Rule
from .role import FAN, ROWS, STRIPED, Picked, Place, Role


@dataclass(frozen=True, slots=True)
class LabelledTensor:
    """A tensor of an op with the labels of its dims."""

    value: str
    dims: tuple[notation.Dim, ...]
    linear: int | None = None
    bias: bool = False

    def dim_of(self, label: str) -> int | None:
        for at, sections in enumerate(self.dims):
            if any(label in section for section in sections):
                return at
        return None


@dataclass(frozen=True)
class Signature:
    """How one op may be split."""

    op: Op
    rule: Rule | None
    inputs: tuple[LabelledTensor, ...]
    outputs: tuple[LabelledTensor, ...]
    labels: Mapping[str, Dim]
    blocked: frozenset[str]
    analysis: Analysis = field(repr=False, compare=False)
    why: str = ""  # why there is no rule, where that is known
    known: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)

    @cached_property
    def roles(self) -> tuple[Role, ...]:
        """The legal splits, labels in the order of the rule."""
        roles: list[Role] = []
        atoms = self.analysis.atoms
        for label, dim in self.labels.items():
            if label in self.blocked:
                continue
            if self._beside_label(label) is not None and self.beside(label) is None:
                continue
            splittable = [atom for atom in atoms.splittable(dim) if self._fits(label, atom)]
            for index, atom in enumerate(splittable):
                name = label if len(splittable) == 1 else f"{label}.{index}"
                roles.append(Role(name=name, label=label, atom=atom, size=atoms.size[atom]))
        return tuple(roles)

    def _fits(self, label: str, atom: int) -> bool:
        """Whether every tensor that has the label has the atom there, once."""
        atoms = self.analysis.atoms
        for bound in (*self.inputs, *self.outputs):
            at = self._dim_of(bound, label)
            if at is None:
                continue
            dim = self.analysis.dims[bound.value][at]
            if atoms.blocks(dim, atom) is None or atoms.expand(dim).count(atom) > 1:
                return False
        return True

    def _beside_label(self, label: str) -> str | None:
        algorithm = self.rule.algorithms.get(label) if self.rule else None
        return algorithm.beside if algorithm else None

    def beside(self, label: str) -> int | None:
        """The atom that an axis takes together with a label: the outermost of the label beside it that can be."""
        other = self._beside_label(label)
        if other is None or other in self.blocked:
            return None
        atoms = self.analysis.atoms.splittable(self.labels[other])
        return next((atom for atom in atoms if self._fits(other, atom)), None)

    def _dim_of(self, bound: LabelledTensor, label: str) -> int | None:
        """The dim that a label is on. Sections of one dim are split together, so one stands for all."""
        key = (bound.dims, label)
        if key not in self.known:
            names = (label, *self._beside.get(label, ()))
            self.known[key] = next((at for at in map(bound.dim_of, names) if at is not None), None)
        return cast("int | None", self.known[key])

    @cached_property
    def _beside(self) -> dict[str, tuple[str, ...]]:
        """For a label that is a section the labels of the sections beside it."""
        together: dict[str, tuple[str, ...]] = {}
        for bound in (*self.inputs, *self.outputs):
            for sections in bound.dims:
                names = tuple(label for section in sections for label in section) if len(sections) > 1 else ()
                together.update(dict.fromkeys(names, names))
        return together

    def role(self, name: str) -> Role:
        role = self.picked(name)
        if role is not None:
            return role
        known = ", ".join(role.name for role in self.roles) or "none"
        raise PlanError(f"{self.op} can't be split on {name!r}; it can be split on: {known}")

    def picked(self, name: str | None) -> Role | None:
        """The role that a choice names; None if it does not split the op."""
        plain = (name or "").removeprefix(STRIPED)
        role = next((role for role in self.roles if role.name == plain), None)
        return role if role is None or plain == name else replace(role, name=f"{STRIPED}{plain}", striped=True)

    def is_split_by(self, algorithm: str, role: Role) -> bool:
        """Whether an algorithm of this name does the split of a role."""
        known = self.rule.algorithms.get(role.label) if self.rule else None
        return known is not None and known.name == algorithm

    def is_triangular(self, role: Role) -> bool:
        """Whether a role splits places whose work grows along the dim."""
        return bool({role.atom, self.beside(role.label)} & self.analysis.triangular)

    def striped(self, role: Role, parts: int) -> Role:
        """The role in stripes, if it splits such places, and evenly."""
        atoms = self.analysis.triangular & {role.atom, self.beside(role.label)}
        if not atoms or any(self.analysis.atoms.size[atom] % parts for atom in atoms):
            return role
        return self.role(f"{STRIPED}{role.name.removeprefix(STRIPED)}")

    def linear_groups(self) -> tuple[int, ...]:
        return tuple(sorted({bound.linear for bound in self.inputs if bound.linear is not None}))

    def layouts(self, choice: Mapping[str, str], mesh: Mesh) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        """The layouts of all inputs and of all outputs under a choice {axis: role}."""
        key = tuple((axis.name, axis.size, choice[axis.name]) for axis in mesh.axes if axis.name in choice)
        if key not in self.known:
            self.known[key] = self._layouts(key)
        return cast("tuple[tuple[Layout, ...], tuple[Layout, ...]]", self.known[key])

    def is_like(self, other: Signature) -> None:
        """An op that differs from another one in its name alone has its layouts: what one knows, both know."""
        object.__setattr__(self, "known", other.known)

    @property
    def kind(self) -> int:
        """A number that ops have in common which are known to be alike."""
        return id(self.known)

    def _layouts(self, picked: Picked) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
        layouts = tuple(self._layout(number, picked) for number in range(len(self.inputs) + len(self.outputs)))
        return layouts[: len(self.inputs)], layouts[len(self.inputs) :]

    def _layout(self, number: int, picked: Picked) -> Layout:
        """The layout of a tensor, inputs counted before outputs. Tensors of equal dims that are cut alike have one."""
        is_input = number < len(self.inputs)
        bound = self.inputs[number] if is_input else self.outputs[number - len(self.inputs)]
        places = tuple((name, size, self._place(number, bound, role)) for name, size, role in picked)
        once, key = self.analysis.once, (self.analysis.dims[bound.value], places)
        if key not in once:
            layout = self._build_layout(bound, places, picked)
            once[key] = once.setdefault(layout, layout)
        return once[key]

    def _build_layout(self, bound: LabelledTensor, places: Sequence[tuple[str, int, Place]], picked: Picked) -> Layout:
        shards: list[list[Shard]] = [[] for _ in bound.dims]
        taken: list[list[tuple[int, int]]] = [[] for _ in bound.dims]
        rest: dict[str, Placement] = {}
        for (name, size, place), (_, _, role) in zip(places, picked, strict=True):
            if not isinstance(place, tuple):
                rest[name] = place
                continue
            at, atom, striped = place
            dim = self.analysis.dims[bound.value][at]
            shard = self.analysis.atoms.shard(dim, atom, Axis(name=name, size=size), taken[at], striped=striped)
            if shard is None:
                raise PlanError(
                    f"{self.op}: {name}={size} can't take {role} of {bound.value}, dim {at} of size "
                    f"{self.analysis.graph.values[bound.value].shape[at]}, after "
                    f"{', '.join(c.axis for c in shards[at])}; the sizes do not divide"
                )
            shards[at].append(shard)
            taken[at].append((atom, size))
        return make_layout(shards, rest)

    def _place(self, number: int, bound: LabelledTensor, picked: str) -> Place:
        """What a role does to a tensor, whatever the axis."""
        key = (self.op.name, number, picked)  # ops that are alike have atoms of their own
        if key not in self.known:
            self.known[key] = self._placed(bound, picked, number < len(self.inputs))
        return cast("Place", self.known[key])

    def _placed(self, bound: LabelledTensor, picked: str, is_input: bool) -> Place:
        if picked == FAN or picked.startswith(ROWS):
            placement = self._unsplit(bound, picked, is_input)
        else:
            role = self.role(picked)
            at, atom = self._dim_of(bound, role.label), role.atom
            if at is None and (other := self._beside_label(role.label)) is not None:
                at, atom = self._dim_of(bound, other), cast(int, self.beside(role.label))
            if at is not None:
                return at, atom, role.striped and atom in self.analysis.triangular
            placement = self._absent(bound, role, is_input)
        return placement if placement != REPLICATE or self.analysis.graph.values[bound.value].gradient else INVARIANT

    def _unsplit(self, bound: LabelledTensor, picked: str, is_input: bool) -> Placement:
        if picked == FAN:
            return REPLICATE
        if not is_input or bound.bias or bound.linear == int(picked.removeprefix(ROWS)):
            return PARTIAL  # a bias is added once, so it comes in parts as well
        return REPLICATE

    def _absent(self, bound: LabelledTensor, role: Role, is_input: bool) -> Placement:
        assert self.rule is not None
        algorithm = self.rule.algorithms.get(role.label)
        if is_input:
            return PARTIAL if bound.bias and role.label in self.rule.sums else REPLICATE
        if algorithm is not None:
            return PARTIAL if algorithm.partial else INVARIANT
        if role.label in self.rule.sums:
            return Partial(self.rule.sums[role.label])
        if not self.analysis.graph.values[bound.value].gradient:
            return INVARIANT  # another output has the label, and this one does not depend on it
        raise PlanError(f"{self.op} can't be split on {role.name}: {bound.value} neither has it nor sums it")


@dataclass(frozen=True)
class Analysis:
    """A graph with atoms for every dim and a signature for every op."""

    graph: Graph
    atoms: Atoms
    dims: dict[str, tuple[Dim, ...]]
    signatures: dict[str, Signature]
    batch_dim: Dim
    constants: frozenset[str]
    once: dict[Any, Layout] = field(default_factory=dict, repr=False, compare=False)  # equal layouts are one

    @cached_property
    def batch(self) -> frozenset[int]:
        """The atom that data parallelism splits: the outermost factor of the batch dim."""
        return frozenset(self.atoms.expand(self.batch_dim)[:1])

    @cached_property
    def triangular(self) -> frozenset[int]:
        """The atoms of places whose work grows along the dim: the sequences of causal attention."""
        ordered = [s.labels[label] for s in self.signatures.values() if s.rule for label in s.rule.triangular]
        return frozenset(atom for dim in ordered for atom in self.atoms.splittable(dim))

    def is_constant(self, op: Op) -> bool:
        """Whether an op is run once, whole, when the program is loaded."""
        return self.constants.issuperset(op.outputs)

    @cached_property
    def live(self) -> tuple[Op, ...]:
        """The ops that are run in every step."""
        return tuple(op for op in self.graph.ops if not self.is_constant(op))

    @cached_property
    def lean(self) -> tuple[Op, ...]:
        """The ops with a gradient that depend on parameters only, or besides on numbers for the dims of parameters."""
        graph, ops = self.graph, list[Op]()
        lean = {parameter.value for parameter in graph.parameters} | self.constants
        lean |= {name for name, value in graph.values.items() if not value.gradient and self._atoms(name) <= self.owned}
        for op in graph.ops:
            if all(name in lean for name in op.inputs) and any(graph.values[name].gradient for name in op.outputs):
                lean |= set(op.outputs)
                ops.append(op)
        return tuple(ops)

    @cached_property
    def owned(self) -> frozenset[int]:
        """The atoms of parameters, but for those of the batch."""
        return frozenset[int]().union(*(self._atoms(item.value) for item in self.graph.parameters)) - self.batch

    def _atoms(self, value: str) -> set[int]:
        return {atom for dim in self.dims[value] for atom in self.atoms.splittable(dim)}

    @cached_property
    def by_atom(self) -> dict[int, tuple[tuple[Op, Role], ...]]:
        """For each atom the ops that can be split on it (each op once)."""
        roles: dict[int, list[tuple[Op, Role]]] = {}
        for op in self.graph.ops:
            seen: set[int] = set()
            for role in self.signatures[op.name].roles:
                if role.atom not in seen:
                    seen.add(role.atom)
                    roles.setdefault(role.atom, []).append((op, role))
        return {atom: tuple(uses) for atom, uses in roles.items()}

"""What constraints come to for one graph: what the search may do with each op, parameter, layer and axis."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property

from ..errors import PlanError, raise_all
from ..ir import Graph, Op, Parameter
from ..ir.paths import is_inside
from ..ir.recompute import faults_of
from ..lower.chunked_loss import faults_of_losses, rows_of
from ..ops.chunked_losses import LOSSES
from ..rules import FAN, Analysis, Role
from .chunking import ChunkCounts
from .constraints import (
    AxisConstraint,
    ChoiceDemand,
    ChunkedLossConstraint,
    Constraint,
    Constraints,
    MemoryConstraint,
    PipelineConstraint,
    RecomputeConstraint,
    ReplicateConstraint,
    SameSplitConstraint,
    SplitConstraint,
    StageCutConstraint,
    Target,
    ZeroConstraint,
)
from .problem_structure import Ways, alike

RUN_WHOLE = ("", FAN)
"""The choices of an op that is not split."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The constraints of a search, resolved for one graph.

    axes       constraints on axes, by name
    demands    constraints on the choices of ops
    together   for some ops the group whose ops are split the same way
    most       the highest ZeRO level of some parameters
    must       modules that have to be recomputed
    never      ops that must not be recomputed
    chunked    losses whose logits are made in chunks, None for the usual number of them
    unchunked  losses whose logits are not
    memory     the memory limit in bytes
    pipeline   the requested stages, microbatches and schedule
    pivots     ops before which a stage begins
    uncut      modules that are on one stage, each with its ops
    """

    axes: Mapping[str, tuple[AxisConstraint, ...]] = field(default_factory=dict)
    demands: Mapping[str, tuple[ChoiceDemand, ...]] = field(default_factory=dict)
    together: Mapping[str, str] = field(default_factory=dict)
    most: Mapping[str, int] = field(default_factory=dict)
    must: tuple[str, ...] = ()
    never: tuple[Op, ...] = ()
    chunked: ChunkCounts = field(default_factory=dict)
    unchunked: frozenset[str] = frozenset()
    memory: float = float("inf")
    pipeline: Mapping[str, int | str] = field(default_factory=dict)
    pivots: tuple[Op, ...] = ()
    uncut: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)

    @property
    def decisions(self) -> dict[str, object]:
        """For `OpKinds`: ops and parameters under different constraints are of different kinds."""
        grouped = {name: (group, self.demands.get(name)) for name, group in self.together.items()}
        return {**self.demands, **grouped, **self.most}

    def ways(self, graph: Graph, base: Ways, *, free: bool = True) -> dict[str, tuple[frozenset[str], ...]]:
        """The recomputation options that are left; without `free` only those of layers that must be recomputed."""
        allowed: dict[str, tuple[frozenset[str], ...]] = {}
        forced: set[str] = set()
        own = [path for path in self.must if not any(is_inside(path, at) or is_inside(at, path) for at in base)]
        for layer, ways in {**base, **{path: (frozenset([path]),) for path in own}}.items():
            must = [path if is_inside(path, layer) else layer for path in self.must
                    if is_inside(path, layer) or is_inside(layer, path)]  # fmt: skip
            more = [frozenset([*must, *(path for path in modules if not any(is_inside(path, outer) for outer in must))])
                    for modules in (frozenset[str](), *ways)
                    if not any(is_inside(outer, path) for outer in must for path in modules)]  # fmt: skip
            ops = [op for op in graph.ops if any(is_inside(op.module_path, path) for path in must)]
            allowed[layer] = tuple(
                modules
                for modules in dict.fromkeys((*ways, *more))
                if all(_is_in(op, modules) for op in ops) and not any(_is_in(op, modules) for op in self.never)
            )
            forced |= {layer} if must else set()
        heads = alike(graph, self.together, allowed)
        allowed = {layer: _shared(layer, [other for other in allowed if heads[other] == heads[layer]], allowed)
                 for layer in allowed}  # fmt: skip
        bound = {heads[layer] for layer in forced}
        return {layer: ways for layer, ways in allowed.items() if free or heads[layer] in bound}


def _shared(layer: str, others: Sequence[str], ways: Ways) -> tuple[frozenset[str], ...]:
    """The recomputation options of a layer that all of `others` have, in the order of the first."""

    def inside(other: str) -> list[frozenset[str]]:
        return [frozenset(path.removeprefix(other) for path in modules) for modules in ways[other]]

    options = [set(inside(other)) for other in others]
    common = [modules for modules in inside(others[0]) if all(modules in known for known in options)]
    return tuple(frozenset(layer + path for path in modules) for modules in common)


def _is_in(op: Op, modules: Iterable[str]) -> bool:
    return any(is_inside(op.module_path, path) for path in modules)


def bind(constraints: Constraints, analysis: Analysis, chunked: Iterable[str] = ()) -> Limits:
    """The limits of a graph. Refuses, all at once, what names nothing that the model has.

    `chunked`: losses whose logits a search tries to make in chunks.
    """
    binder = _Binder(constraints, analysis)
    binder.chunked |= dict.fromkeys(chunked)
    for item in constraints.items:
        binder.add(item)
    raise_all(PlanError, f"the constraints do not fit {analysis.graph.name}:", binder.faults)
    return binder.finish()


def sizes_of(item: SplitConstraint, constraints: Constraints, analysis: Analysis) -> str:
    """What a label that ops are to be split on has: "n has 128 in blocks.0.up / linear"."""
    binder, sizes = _Binder(constraints, analysis), dict[tuple[str, int], str]()
    for op in binder.live:
        if item.target.takes(op, constraints.classes):
            for role in analysis.signatures[op.name].roles:
                if binder.is_meant(role, item.label):
                    sizes.setdefault((role.name, role.size), f"{role.name} has {role.size} in {op.name}")
    return ", ".join(list(sizes.values())[:3])


class _Binder:
    def __init__(self, constraints: Constraints, analysis: Analysis) -> None:
        self.analysis, self.graph, self.classes = analysis, analysis.graph, constraints.classes
        self.live = analysis.live
        self.faults: list[str] = []
        self.axes: dict[str, tuple[AxisConstraint, ...]] = {}
        self.demands: dict[str, tuple[ChoiceDemand, ...]] = {}
        self.groups: dict[str, str] = {}
        self.most: dict[str, int] = {}
        self.must: list[str] = []
        self.never: dict[str, Op] = {}
        self.chunked: dict[str, int | None] = {}
        self.memory = float("inf")
        self.pipeline: dict[str, int | str] = {}
        self.pivots: dict[str, Op] = {}
        self.uncut: dict[str, tuple[Op, ...]] = {}

    def finish(self) -> Limits:
        must = dict.fromkeys(self.must)
        outer = [path for path in must if not any(path != other and is_inside(path, other) for other in must)]
        return Limits(
            axes=self.axes,
            demands=self.demands,
            together=self.groups,
            most=self.most,
            must=tuple(outer),
            never=tuple(self.never.values()),
            chunked={name: chunks for name, chunks in self.chunked.items() if chunks != 0},
            unchunked=frozenset(name for name, chunks in self.chunked.items() if chunks == 0),
            memory=self.memory,
            pipeline=self.pipeline,
            pivots=tuple(self.pivots.values()),
            uncut=self.uncut,
        )

    def add(self, item: Constraint) -> None:
        if isinstance(item, AxisConstraint):
            self.axes[item.name] = (*self.axes.get(item.name, ()), item)
            return
        if isinstance(item, MemoryConstraint):
            self.memory = min(self.memory, item.bytes)
            return
        if isinstance(item, PipelineConstraint):
            old = self.pipeline.setdefault(item.what, item.value)
            if old != item.value:
                self.faults.append(f"{item.source}: another entry asks for {item.what}: {old}; leave one of them out")
            return
        if unknown := list(self._unknown(item.target)):
            self.faults += [f"{item.source}: {fault}" for fault in unknown]
            return
        ops = [op for op in self.live if item.target.takes(op, self.classes)]
        if not ops and not isinstance(item, ZeroConstraint):
            self.faults.append(f"{item.source}: no op of the model is meant")
            return
        if isinstance(item, SplitConstraint | ReplicateConstraint) and item.on is not None:
            self.axes.setdefault(item.on, ())
        adders: dict[type, Callable[..., None]] = {
            SplitConstraint: self._split,
            ReplicateConstraint: self._replicated,
            SameSplitConstraint: self._together,
            RecomputeConstraint: self._recompute,
            ChunkedLossConstraint: self._chunked_loss,
            ZeroConstraint: self._zero,
            StageCutConstraint: self._cut,
        }
        adders[type(item)](item, ops)

    def _unknown(self, target: Target) -> Iterable[str]:
        paths = list(self.classes) or list(self.graph.under)
        for pattern in target.modules:
            if not any(Target(modules=(pattern,)).place(path, {}) for path in paths):
                yield f"the model has no module {pattern!r}; it has {_some(pattern, paths)}"
        names = list(dict.fromkeys(self.classes.values()))
        for name in target.classes:
            if name not in names:
                yield f"the model has no module of class {name!r}; it has {_some(name, names)}"
        for name in target.ops:
            if not any(Target(ops=(name,)).takes(op, {}) for op in self.live):
                kinds = list(dict.fromkeys(op.target.rpartition(".")[0] for op in self.live))
                yield f"the model has no op {name!r}; it has {_some(name, kinds)}"

    def _demand(self, op: Op, demand: ChoiceDemand) -> None:
        self.demands[op.name] = (*self.demands.get(op.name, ()), demand)

    def _split(self, item: SplitConstraint, ops: Sequence[Op]) -> None:
        matched = False
        for op in ops:
            roles = self.analysis.signatures[op.name].roles
            picks = tuple(role.name for role in roles if self.is_meant(role, item.label))
            if picks:
                matched = True
                self._demand(op, ChoiceDemand(picks, item.on, every=item.on is not None))
        if not matched:
            known: dict[str, str] = {}
            for op in ops:
                labels = dict.fromkeys(role.label for role in self.analysis.signatures[op.name].roles)
                known.setdefault(op.target.split(".")[1], ", ".join(labels) or "none")
            there = "; ".join(f"{kind} has {labels}" for kind, labels in list(known.items())[:6])
            self.faults.append(f"{item.source}: no op there has the label {item.label!r}; {there}")

    def is_meant(self, role: Role, label: str) -> bool:
        if label == "batch":
            return role.atom in self.analysis.batch
        if label == "sequence":
            return role.atom in self.sequence
        return label in (role.name, role.label)

    @cached_property
    def sequence(self) -> set[int]:
        """Atoms of the middle dim of [batch, sequence, features] activations."""
        analysis, atoms = self.analysis, set[int]()
        for value in self.graph.values.values():
            if len(value.shape) == 3 and value.gradient and value.shape[0] == self.graph.batch:
                atoms.update(analysis.atoms.splittable(analysis.dims[value.name][1]))
        return atoms - analysis.batch

    def _replicated(self, item: ReplicateConstraint, ops: Sequence[Op]) -> None:
        for op in ops:
            self._demand(op, ChoiceDemand(RUN_WHOLE, item.on))

    def _together(self, item: SameSplitConstraint, ops: Sequence[Op]) -> None:
        """Ops of one name in their modules are a group, together with all groups that they are in already."""
        heads: dict[tuple[str, str], str] = {}
        for op in ops:
            place = item.target.place(op.module_path, self.classes) or ""
            head = heads.setdefault((op.name.removeprefix(place), op.target), op.name)
            old, new = self.groups.get(op.name), self.groups.get(head, head)
            if old is not None and old != new:
                self.groups |= {name: new for name, group in self.groups.items() if group == old}
            self.groups[op.name] = self.groups[head] = new

    def _recompute(self, item: RecomputeConstraint, ops: Sequence[Op]) -> None:
        if not item.wanted:
            self.never |= {op.name: op for op in ops}
            return
        for path in dict.fromkeys(item.target.place(op.module_path, self.classes) or "" for op in ops):
            self.faults += [f"{item.source}: it asks for {path!r}, {why}" for why in faults_of(self.graph, path)]
            self.must.append(path)

    def _chunked_loss(self, item: ChunkedLossConstraint, ops: Sequence[Op]) -> None:
        losses = {op.name: op for op in ops if op.target in LOSSES}
        if not losses:
            self.faults.append(f"{item.source}: no cross_entropy of the model is meant")
        faults = faults_of_losses(self.graph) if item.chunks != 0 else {}
        for name, op in losses.items():
            rows = rows_of(op, self.graph)
            if (fault := faults.get(name)) is not None:
                self.faults.append(f"{item.source}: {op} can't be, {fault}")
            elif item.chunks is not None and item.chunks > rows:
                self.faults.append(f"{item.source}: {op} has {rows} rows; ask for {rows} chunks at most")
            elif self.chunked.setdefault(name, item.chunks) != item.chunks:
                self.faults.append(f"{item.source}: another entry asks for other chunks of {op}; leave one of them out")

    def _cut(self, item: StageCutConstraint, ops: Sequence[Op]) -> None:
        modules: dict[str, list[Op]] = {}
        for op in ops:
            modules.setdefault(item.target.place(op.module_path, self.classes) or "", []).append(op)
        for path, module_ops in modules.items():
            if item.before:
                self.pivots[path] = module_ops[0]
            else:
                self.uncut[path] = tuple(module_ops)

    def _zero(self, item: ZeroConstraint, ops: Sequence[Op]) -> None:
        names = {op.name for op in ops}
        parameters = [parameter for parameter in self.graph.parameters if self._is_about(item.target, parameter, names)]
        if not parameters:
            self.faults.append(f"{item.source}: no parameter of the model is meant")
        for parameter in parameters:
            self.most[parameter.key] = min(item.level, self.most.get(parameter.key, item.level))

    def _is_about(self, target: Target, parameter: Parameter, ops: set[str]) -> bool:
        """By the module that it is in, or where ops are named, by an op that uses it."""
        if target.ops:
            return any(user.name in ops for user, _ in self.graph.users[parameter.value])
        return any(target.place(key.rpartition(".")[0], self.classes) is not None for key in parameter.keys)


def _some(name: str, known: Sequence[str]) -> str:
    """A few names out of many: those like the one that was written, else the first."""
    close = get_close_matches(name, known, n=4, cutoff=0.5)
    shown = close or [candidate for candidate in known if candidate][:8]
    return ", ".join(shown) + (", .." if len(shown) < len(known) else "")
